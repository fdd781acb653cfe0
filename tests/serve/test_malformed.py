"""Images that are none, forms and JSON that cannot be read: a refusal, never a 500."""

import io
import json

import pytest
from PIL import Image

from serving import JSON, bomb, encoded, picture, text


def hostile_images():
    good = picture()
    yield "empty", b"", 415
    yield "text", b"hello", 415
    yield "bomb", bomb(30_000, 30_000), 413
    yield "long bomb", bomb(1, 2_000_000), 413
    yield "truncated", good[: len(good) // 2], 422
    yield "postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415
    yield "svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415
    yield "zip", b"PK\x03\x04" + bytes(100), 415
    yield "tiff of nonsense", b"II*\x00" + b"\xff" * 64, (415, 422)
    yield "gif without frames", b"GIF89a" + bytes(20), (415, 422)
    yield "float", encoded(Image.new("F", (8, 8), 1e9), "TIFF"), 422


@pytest.mark.parametrize(("what", "data", "status"), list(hostile_images()))
@pytest.mark.parametrize("form", [True, False], ids=["multipart", "base64"])
@pytest.mark.parametrize("address", ["/v1/predict", "/v1/predict/auto"])
def test_an_image_that_is_none_is_refused(client, what, data, status, form, address):
    fields = {"domain": "d0"} if address == "/v1/predict" else {}
    if form:
        reply = client.post(address, data=fields, files={"images": ("x", data)})
    else:
        reply = client.post(address, json=fields | {"images": [text(data)]})
    assert reply.status_code in (status if isinstance(status, tuple) else (status,)), reply.text


def test_an_image_that_is_far_longer_than_wide_is_refused(client):
    data = encoded(Image.new("RGB", (1, 500_000)))
    reply = client.post("/v1/predict", json={"domain": "d0", "images": [text(data)]})
    assert reply.status_code == 422
    assert "1 × 500000" in reply.json()["error"]


def test_an_animated_or_turned_image_is_taken(client):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    for data in (buffer.getvalue(), picture(kind="WEBP"), picture(kind="TIFF")):
        body = {"domain": "d0", "images": [text(data)]}
        assert client.post("/v1/predict", json=body).status_code == 200


FORM = "multipart/form-data; boundary=x"


def part(name, value, file=None):
    extra = f'; filename="{file}"' if file else ""
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return head.encode() + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"


END = b"--x--\r\n"
GOOD_FORM = part("domain", "d0") + part("images", picture(), "a.png") + END
MALFORMED = {
    "no content type": ({}, b"x", 415),
    "text": ({"Content-Type": "text/plain"}, b"x", 415),
    "urlencoded": ({"Content-Type": "application/x-www-form-urlencoded"}, b"domain=d0", 415),
    "an image as body": ({"Content-Type": "image/png"}, picture(), 415),
    "gzip": (JSON | {"Content-Encoding": "gzip"}, b"{}", 415),
    "empty json": (JSON, b"", 422),
    "no json": (JSON, b"{", 422),
    "not utf-8": (JSON, b'{"domain": "\xff\xfe", "images": ["AA=="]}', 422),
    "a list": (JSON, b"[]", 422),
    "deep": (JSON, b"[" * 50_000 + b"]" * 50_000, 422),
    "deep field": (JSON, b'{"images":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 422),
    "no images": (JSON, b'{"domain": "d0", "images": []}', 422),
    "images no list": (JSON, b'{"domain": "d0", "images": "AA=="}', 422),
    "no base64": (JSON, b'{"domain": "d0", "images": ["%%%"]}', 422),
    "base64 without its end": (JSON, b'{"domain": "d0", "images": ["AAA"]}', 422),
    "base64 not ascii": (JSON, '{"domain": "d0", "images": ["é"]}'.encode(), 422),
    "lone surrogate": (JSON, b'{"domain": "\\ud800", "images": ["AA=="]}', 422),
    "top_k 0": (JSON, b'{"domain": "d0", "images": ["AA=="], "top_k": 0}', 422),
    "top_k huge": (JSON, b'{"domain": "d0", "images": ["AA=="], "top_k": 1e99}', 422),
    "top_k nan": (JSON, b'{"domain": "d0", "images": ["AA=="], "top_k": NaN}', 422),
    "unknown field": (JSON, b'{"domain": "d0", "images": ["AA=="], "x": 1}', 422),
    "too many images": (JSON, json.dumps({"domain": "d0", "images": ["AA=="] * 5}).encode(), 422),
    "no boundary": ({"Content-Type": "multipart/form-data"}, GOOD_FORM, 400),
    "another boundary": ({"Content-Type": "multipart/form-data; boundary=y"}, GOOD_FORM, 400),
    "cut form": ({"Content-Type": FORM}, GOOD_FORM[:80], 400),
    "no form": ({"Content-Type": FORM}, b"\r\n" * 1000, 400),
    "form without image": ({"Content-Type": FORM}, part("domain", "d0") + END, 422),
    "image as text": (
        {"Content-Type": FORM},
        part("domain", "d0") + part("images", "AA==") + END,
        422,
    ),
    "file as domain": ({"Content-Type": FORM}, part("domain", b"d0", "d0") + END, 422),
    "domain twice": ({"Content-Type": FORM}, part("domain", "d0") + GOOD_FORM, 422),
    "long field": ({"Content-Type": FORM}, part("domain", "d" * 5000) + END, 422),
    "many files": (
        {"Content-Type": FORM},
        b"".join(part("images", b"x", "x") for _ in range(50)) + END,
        422,
    ),
    "many fields": (
        {"Content-Type": FORM},
        b"".join(part(f"f{i}", "x") for i in range(500)) + END,
        422,
    ),
    "part without a name": (
        {"Content-Type": FORM},
        b"--x\r\nContent-Disposition: form-data\r\n\r\nx\r\n" + END,
        400,
    ),
    "odd charset": (
        {"Content-Type": FORM + "; charset=no-such"},
        part("domain", "d0") + END,
        422,
    ),
    "null bytes": ({"Content-Type": FORM}, part("domain", "d\0") + GOOD_FORM, 422),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_request_is_refused(client, what):
    headers, body, status = MALFORMED[what]
    reply = client.post("/v1/predict", content=body, headers=headers)
    assert reply.status_code in (status if isinstance(status, tuple) else (status,)), reply.text
    assert "Traceback" not in reply.text
    assert reply.json()["request"] == reply.headers["X-Request-ID"]
