"""A good client goes on and gets the same answers while others send what decodes slowly, bombs and nonsense."""

import http.client
import io
import json
import random
import struct
import threading

import numpy as np
import pytest
from PIL import Image

from serving import JSON, PATIENCE, bomb, library, make_app, picture, running, text

FORM = {"Content-Type": "multipart/form-data; boundary=x"}
REFUSED = {400, 404, 408, 411, 413, 415, 422, 429, 503}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return library(tmp_path_factory.mktemp("served") / "library", 2)


def form(*files: bytes) -> bytes:
    head = b'--x\r\nContent-Disposition: form-data; name="images"; filename="f"\r\n\r\n'
    domain = b'--x\r\nContent-Disposition: form-data; name="domain"\r\n\r\nd0'
    return b"\r\n".join([domain, *(head + file for file in files), b"--x--", b""])


def run_length_bitmap(width: int, height: int) -> bytes:
    """A BMP of RLE8 that says one pixel at a time."""
    rows = (b"\x01\x07" * width + b"\x00\x00") * height + b"\x00\x01"
    palette = bytes(1024)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(rows), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(rows), 0, 0, 54 + 1024) + head + palette + rows


def progressive(side: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", progressive=True, quality=95)
    return file.getvalue()


def bombs() -> list[tuple[bytes, dict[str, str]]]:
    """Bodies that cost more than they should, with their headers."""
    nested = "[" * 100_000 + "]" * 100_000
    bodies = [
        '{"domain":"d0","images":[' + "1," * 300_000 + "1]}",
        '{"domain":"d0","images":' + nested + "}",
        '{"domain":"d0","images":["a"],"top_k":' + "9" * 100_000 + "}",
        '{"domain":"d0","images":["a"],"top_k":1e999}',
        '{"domain":"' + "\\ud800" * 50_000 + '","images":["a"]}',
        "{" + '"domain":"d0",' * 100_000 + '"images":["a"]}',
        '{"images":["a"],"domains":[' + '"d0",' * 9_000 + '"d0"]}',
        '{"domain":"d0","images":["' + "A" * 3_000_001 + '"]}',
        "\ufeff{}",
        "",
    ]
    slow = [bomb(5000, 5000), bomb(1, 2_000_000), run_length_bitmap(1500, 1500), progressive(1500)]
    files = [form(*[slow[0]] * 32), *(form(one) for one in slow), form(*[b""] * 5), form() * 1000]
    return [(body.encode("utf-8"), JSON) for body in bodies] + [(body, FORM) for body in files]


def damaged(draw: random.Random) -> tuple[bytes, dict[str, str]]:
    """A good request with some of its bytes changed, cut, or said twice."""
    body = bytearray(form(picture(kind=draw.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))))
    for _ in range(draw.randint(1, 20)):
        body[draw.randrange(len(body))] = draw.randrange(256)
    end = draw.choice([len(body), draw.randrange(len(body))])
    return bytes(body[:end]) * draw.choice([1, 1, 2]), FORM


def ask(address, target: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
    try:
        connection.request("POST", target, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def attack(folder, cases: int) -> None:
    good = json.dumps({"domain": "d1", "images": [text(picture())]}).encode()
    over, answers, statuses = threading.Event(), [], []
    waiting = [*bombs(), *(damaged(random.Random(number)) for number in range(cases))]
    random.Random(0).shuffle(waiting)
    lock = threading.Lock()

    def go_on() -> None:
        while not over.is_set():
            answers.append(ask(address, "/v1/predict", good, JSON))

    def send() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                body, headers = waiting.pop()
            target = "/v1/predict/auto" if len(waiting) % 4 == 0 else "/v1/predict"
            statuses.append(ask(address, target, body, headers)[0])

    with running(make_app(folder)) as (_, address):
        client = threading.Thread(target=go_on)
        others = [threading.Thread(target=send) for _ in range(4)]
        for thread in (client, *others):
            thread.start()
        for thread in others:
            thread.join()
        over.set()
        client.join()
    assert len(statuses) == cases + len(bombs())
    assert set(statuses) <= REFUSED | {200}
    assert {status for status, _ in answers} == {200}
    assert len({json.dumps(json.loads(answer)["images"]) for _, answer in answers}) == 1


def test_a_good_client_goes_on_beside_bombs_and_damaged_requests(folder):
    attack(folder, 20)


@pytest.mark.slow
def test_a_good_client_goes_on_beside_thousands_of_damaged_requests(folder):
    attack(folder, 3000)
