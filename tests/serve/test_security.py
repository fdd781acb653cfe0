"""Who may do what, and what hostile requests get: a refusal, never a 500."""

import io
import json
import logging
import struct
import zlib

import pytest
from PIL import Image
from starlette.requests import Request
from starlette.testclient import TestClient

from polymask.errors import PolymaskError
from polymask.serve import Settings
from polymask.serve.refusal import Refusal
from polymask.serve.security import Bodies
from polymask.serve.settings import read_token
from serving import encoded, library, make_app, pack, picture, text

LOCAL = "http://localhost"
TOKEN = "0123456789abcdef0123"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
BYTES = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return library(tmp_path_factory.mktemp("served") / "library", 1)


@pytest.fixture(scope="module")
def client(folder):
    options = {"max_body_bytes": 1 << 20, "max_pixels": 1_000_000, "max_pack_bytes": 1 << 20}
    app = make_app(folder, max_images=4, **options)
    with TestClient(app, base_url=LOCAL, raise_server_exceptions=False) as client:
        yield client


def still_answers(client):
    reply = client.post("/v1/predict", json={"domain": "d0", "images": [text(picture())]})
    return reply.status_code == 200


def bomb(width, height):
    """A PNG of a few kB that says it has width × height pixels."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = zlib.compress(bytes(1 + 3 * width) * min(height, 100))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


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


def test_an_image_long_enough_to_fill_the_memory_when_enlarged_is_cut(client):
    data = encoded(Image.new("RGB", (1, 500_000)))
    body = {"domain": "d0", "images": [text(data)]}
    assert client.post("/v1/predict", json=body).status_code == 200


JSON = {"Content-Type": "application/json"}
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


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../d0",
        "..%2Fd0",
        "%2e%2e%2fd0",
        "a%00b",
        ".hidden",
        "a/b",
        "d0%0a",
        "x" * 101,
        "é",
        "%ff",
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_names_cannot_lead_out_of_the_folder(client, folder, name, method):
    before = sorted(folder.parent.rglob("*"))
    reply = client.request(method, f"/v1/domains/{name}", content=b"x", headers=BYTES)
    assert reply.status_code in (404, 405, 422)
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["../d0", "..\\d0", "/etc/passwd", "d0\0", ".d0", "d0.safetensors/.."]
)
def test_a_prediction_cannot_name_a_file_elsewhere(client, name):
    body = {"domain": name, "images": [text(picture())]}
    assert client.post("/v1/predict", json=body).status_code == 404


def test_a_body_beyond_the_limit_is_refused_whether_it_says_its_length_or_not(client):
    def endless():
        for _ in range(64):
            yield b"x" * 65536

    for content in (b"x" * (2 << 20), endless()):
        reply = client.post("/v1/predict", content=content, headers=JSON)
        assert reply.status_code == 413
    reply = client.put("/v1/domains/x", content=b"x" * (2 << 20), headers=BYTES)
    assert reply.status_code == 413
    assert still_answers(client)


def test_a_pack_must_come_as_bytes(client):
    for kind in ("text/html", "multipart/form-data; boundary=x", "application/json"):
        reply = client.put("/v1/domains/x", content=b"x", headers={"Content-Type": kind})
        assert reply.status_code == 415


def test_bodies_that_are_too_many_at_once_are_refused_before_they_are_read(folder):
    def request(**headers):
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        return Request({"type": "http", "headers": raw})

    bodies = Bodies(Settings(library=folder, max_body_bytes=600, max_bodies_bytes=1000))
    with bodies.room_for(request(content_length="500")):
        with bodies.room_for(request(content_length="500")):
            for another in (request(content_length="1"), request()):
                with pytest.raises(Refusal) as refused, bodies.room_for(another):
                    pass
                assert refused.value.status == 429
        with pytest.raises(Refusal), bodies.room_for(request(transfer_encoding="chunked")):
            pass  # it may be as long as is allowed
    with bodies.room_for(request()):
        pass


def test_a_queue_that_is_full_answers_429_with_a_time(folder):
    app = make_app(folder, max_queue=2)
    with TestClient(app, base_url=LOCAL) as client:
        body = {"domain": "d0", "images": [text(picture())] * 3}
        reply = client.post("/v1/predict", json=body)
    assert reply.status_code == 429
    assert int(reply.headers["Retry-After"]) >= 1


def test_a_network_that_takes_too_long_answers_503(folder, monkeypatch):
    import threading

    release = threading.Event()
    app = make_app(folder, timeout=0.05)
    monkeypatch.setattr(app.state.engine.library, "load", lambda entry: release.wait(20))
    with TestClient(app, base_url=LOCAL) as client:
        reply = client.post("/v1/predict", json={"domain": "d0", "images": [text(picture())]})
        release.set()
    assert reply.status_code == 503
    assert "Retry-After" in reply.headers


def test_a_mistake_of_the_server_shows_no_traceback(folder, monkeypatch):
    app = make_app(folder)
    monkeypatch.setattr(app.state.engine.library, "entries", lambda: 1 / 0)
    with TestClient(app, base_url=LOCAL, raise_server_exceptions=False) as client:
        reply = client.get("/v1/domains")
    assert reply.status_code == 500
    assert set(reply.json()) == {"error", "request"}
    assert "ZeroDivision" not in reply.text
    assert reply.headers["X-Request-ID"] == reply.json()["request"]


def test_writing_needs_the_token_and_reading_does_not(folder, tmp_path):
    data = pack(tmp_path / "x.safetensors")
    with TestClient(make_app(folder, token=TOKEN), base_url=LOCAL) as client:
        assert client.get("/v1/domains").status_code == 200
        for headers in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer wrong"}):
            reply = client.put("/v1/domains/t", content=data, headers=BYTES | headers)
            assert reply.status_code == 401
            assert reply.headers["WWW-Authenticate"] == "Bearer"
            assert client.delete("/v1/domains/d0", headers=headers).status_code == 401
        reply = client.put("/v1/domains/t", content=data, headers=BYTES | BEARER)
        assert reply.status_code == 201
        assert client.delete("/v1/domains/t", headers=BEARER).status_code == 204


def test_reading_can_need_the_token_too(folder):
    app = make_app(folder, token=TOKEN, token_for_reads=True)
    body = {"domain": "d0", "images": [text(picture())]}
    with TestClient(app, base_url=LOCAL) as client:
        for address in ("/v1/domains", "/v1/domains/d0", "/metrics"):
            assert client.get(address).status_code == 401
            assert client.get(address, headers=BEARER).status_code == 200
        assert client.post("/v1/predict", json=body).status_code == 401
        assert client.post("/v1/predict", json=body, headers=BEARER).status_code == 200
        for address in ("/healthz", "/readyz", "/"):
            assert client.get(address).status_code == 200


def test_a_server_for_others_without_a_token_takes_no_packs(folder):
    with TestClient(make_app(folder, allow_writes=False), base_url=LOCAL) as client:
        assert client.delete("/v1/domains/d0").status_code == 403
        assert client.put("/v1/domains/x", content=b"x", headers=BYTES).status_code == 403
        assert client.get("/v1/domains").json()["writable"] is False


def test_a_page_of_another_site_cannot_reach_a_local_server_by_its_own_name(folder):
    app = make_app(folder, hosts=("localhost", "127.0.0.1", "[::1]"))
    with TestClient(app, base_url=LOCAL) as client:
        for host in (
            "localhost",
            "localhost:8000",
            "127.0.0.1:1",
            "[::1]:80",
            "[::1]",
            "LOCALHOST",
        ):
            assert client.get("/healthz", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "", "127.0.0.1.nip.io:8000"):
            assert client.get("/v1/domains", headers={"Host": host}).status_code == 421


def test_other_origins_are_not_let_in_unless_they_are_named(folder):
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "PUT"}
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        reply = client.options("/v1/domains/x", headers=ask)
        assert reply.status_code == 405
        assert "access-control-allow-origin" not in reply.headers
        reply = client.get("/v1/domains", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in reply.headers
    app = make_app(folder, cors_origins=("https://a.example",))
    with TestClient(app, base_url=LOCAL) as client:
        assert client.options("/v1/domains/x", headers=ask).status_code == 200
        ask["Origin"] = "https://b.example"
        assert client.options("/v1/domains/x", headers=ask).status_code == 400


def test_logs_carry_the_request_id_and_nothing_of_the_image(folder, caplog):
    data = picture(7)
    with (
        caplog.at_level(logging.INFO, "polymask.serve"),
        TestClient(make_app(folder, log_requests=True), base_url=LOCAL) as client,
    ):
        client.post(
            "/v1/predict",
            json={"domain": "d0", "images": [text(data)]},
            headers={"X-Request-ID": "mine-1"},
        )
        odd = client.get("/healthz", headers={"X-Request-ID": "a\tb{" + "x" * 100})
    line = json.loads(caplog.records[0].message)
    assert (line["request"], line["status"], line["domain"]) == ("mine-1", 200, "d0")
    assert text(data)[:40] not in caplog.text
    assert "{" not in odd.headers["X-Request-ID"]


def test_every_answer_forbids_outside_content(client):
    for address in ("/", "/v1/domains", "/nowhere"):
        headers = client.get(address).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_uses_nothing_from_elsewhere(client):
    for address in ("/", "/page.css", "/page.js"):
        reply = client.get(address)
        assert reply.status_code == 200
        outside = reply.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in outside
        assert "https://" not in outside


@pytest.mark.parametrize(
    "content", ["", "short", "two words in one line of it", "x" * 600, "é" * 20]
)
def test_a_token_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "token").write_text(content, encoding="utf-8")
    with pytest.raises(PolymaskError):
        read_token(tmp_path / "token")
    with pytest.raises(PolymaskError, match="cannot be read"):
        read_token(tmp_path / "missing")


def test_settings_that_make_no_sense_are_refused(tmp_path):
    for wrong in ({"max_queue": 0}, {"timeout": -1.0}, {"token_for_reads": True}):
        with pytest.raises(PolymaskError):
            Settings(library=tmp_path, **wrong)
    with pytest.raises(PolymaskError, match="no library"):
        make_app(tmp_path / "missing")


def test_metrics_count_requests_images_and_the_cache(folder):
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        for _ in range(3):
            client.post("/v1/predict", json={"domain": "d0", "images": [text(picture())] * 2})
        client.get("/nowhere")
        found = dict(
            line.rsplit(" ", 1)
            for line in client.get("/metrics").text.splitlines()
            if not line.startswith("#")
        )
    assert found['polymask_requests_total{route="/v1/predict",status="200"}'] == "3.0"
    assert found['polymask_requests_total{route="other",status="404"}'] == "1.0"
    assert found["polymask_images_total"] == "6.0"
    assert (found["polymask_cache_misses_total"], found["polymask_cache_hits_total"]) == (
        "1.0",
        "2.0",
    )
    assert float(found["polymask_cache_bytes"]) > 0


def test_a_library_that_vanishes_is_not_ready(tmp_path):
    folder = library(tmp_path / "library", 1)
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        assert client.get("/readyz").status_code == 200
        folder.rename(tmp_path / "elsewhere")
        assert client.get("/readyz").status_code == 503
        assert client.get("/v1/domains").status_code == 503
        assert client.get("/healthz").status_code == 200


def test_the_openapi_knows_every_address_and_both_kinds_of_body(client):
    found = client.get("/openapi.json").json()
    assert set(found["paths"]) == {
        "/v1/predict",
        "/v1/predict/auto",
        "/v1/domains",
        "/v1/domains/{name}",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    content = found["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    assert set(content) == {"multipart/form-data", "application/json"}


def test_an_animated_or_turned_image_is_taken(client):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    for data in (buffer.getvalue(), picture(kind="WEBP"), picture(kind="TIFF")):
        body = {"domain": "d0", "images": [text(data)]}
        assert client.post("/v1/predict", json=body).status_code == 200
