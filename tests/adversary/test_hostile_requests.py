"""What a stranger sends costs the stranger's own request and nothing else."""

import asyncio
import io
import json
import os
import signal
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.requests import Request
from starlette.testclient import TestClient

from forged_packs import read_parts, write_forged
from polymask.data.split import Shrink
from polymask.serve import app, decoding, requests
from polymask.serve.decoding import Bounds, Decoders
from polymask.serve.requests import PredictBody
from polymask.serve.settings import Refusal, Settings
from serving import JSON, LOCAL, TOKEN, library, make_app, picture, text

SHRINK = Shrink(64)
BOUNDS = Bounds(max_pixels=25_000_000, seconds=2.0, memory=200 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return library(tmp_path_factory.mktemp("served") / "library", 2)


@pytest.fixture(scope="module")
def client(folder):
    with TestClient(make_app(folder), base_url=LOCAL, raise_server_exceptions=False) as client:
        yield client


def png(width: int, height: int) -> bytes:
    """A PNG of zeros, whose file is a thousandth of its pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = zlib.compress(bytes((1 + 3 * width) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("address", ["/v1/predict", "/v1/predict/auto"])
@pytest.mark.parametrize("element", ["1", "null", "[]", '"*"'])
def test_a_list_with_very_many_wrong_elements_is_refused_at_the_first(client, address, element):
    named = "" if address.endswith("auto") else '"domain":"d0",'
    body = "{" + named + '"images":[' + ",".join([element] * 1_000_000) + "]}"
    began = time.process_time()
    reply = client.post(address, content=body, headers=JSON)
    assert reply.status_code == 422
    assert len(reply.content) < 1000
    assert time.process_time() - began < 3


def test_domains_that_are_not_names_are_refused_at_the_first(client):
    body = '{"images":["a"],"domains":[' + ",".join(["1"] * 1_000_000) + "]}"
    began = time.process_time()
    assert client.post("/v1/predict/auto", content=body, headers=JSON).status_code == 422
    assert time.process_time() - began < 3


@pytest.mark.parametrize("width", [1, 300])
def test_an_image_that_is_far_longer_than_wide_is_refused_before_it_is_decoded(client, width):
    reply = client.post("/v1/predict", json={"domain": "d0", "images": [text(png(width, 60_000))]})
    assert reply.status_code == 422
    assert "too long" in reply.json()["error"]


def test_formats_that_decode_slowly_are_not_taken(client):
    body = b"P3\n100 100\n255\n" + b"1 " * 30_000
    assert client.post("/v1/predict", json={"domain": "d0", "images": [text(body)]}).status_code == 415


def run_with(bounds: Bounds, work, most: int = 2):
    async def main():
        decoders = Decoders(bounds, most)
        try:
            return await work(decoders)
        finally:
            await decoders.close()

    return asyncio.run(main())


def test_a_file_that_takes_too_long_ends_its_decoder_and_the_next_one_is_decoded():
    async def work(decoders):
        with pytest.raises(Refusal, match="to decode") as refused:
            await decoders.decode(png(5000, 5000), SHRINK)
        return refused.value.status, (await decoders.decode(picture(), SHRINK)).shape

    status, shape = run_with(Bounds(max_pixels=25_000_000, seconds=0.05, memory=200 << 20), work)
    assert status == 422
    assert shape[2] == 3


def test_a_file_that_takes_too_much_memory_is_refused_and_the_next_one_is_decoded():
    async def work(decoders):
        with pytest.raises(Refusal, match=r"memory|cannot be decoded"):
            await decoders.decode(png(5000, 5000), SHRINK)
        return (await decoders.decode(picture(), SHRINK)).shape

    assert run_with(Bounds(max_pixels=25_000_000, seconds=20, memory=40 << 20), work)[2] == 3


def test_a_decoder_that_is_killed_is_replaced():
    async def work(decoders):
        await decoders.decode(picture(), SHRINK)
        (idle,) = decoders._idle
        os.kill(idle.pid, signal.SIGKILL)
        await idle.wait()
        return (await decoders.decode(picture(), SHRINK)).shape

    assert run_with(BOUNDS, work)[2] == 3


def test_a_request_that_is_given_up_frees_its_decoder():
    async def work(decoders):
        waiting = asyncio.create_task(decoders.decode(png(5000, 5000), SHRINK))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return (await decoders.decode(picture(), SHRINK)).shape

    assert run_with(BOUNDS, work, most=1)[2] == 3


def test_a_decoder_gives_the_pixels_that_this_process_would():
    image = Image.open(io.BytesIO(picture(size=(300, 200)))).convert("RGB")

    async def work(decoders):
        return await decoders.decode(picture(size=(300, 200)), SHRINK)

    assert np.array_equal(run_with(BOUNDS, work), SHRINK(image))


def test_no_decoder_is_left_when_the_server_has_ended(folder):
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        client.post("/v1/predict", json={"domain": "d0", "images": [text(picture())]}).raise_for_status()
        decoders = list(client.app.state.engine.decoders._idle)
        assert decoders
    for decoder in decoders:
        with pytest.raises(ProcessLookupError):
            os.kill(decoder.pid, 0)


@pytest.mark.parametrize("origin", ["https://example.com", "null", "http://localhost:9999"])
def test_a_page_of_another_site_may_not_use_the_server(client, folder, origin):
    body = {"domain": "d0", "images": [text(picture())]}
    assert client.post("/v1/predict", json=body, headers={"Origin": origin}).status_code == 403
    assert client.post("/v1/predict", json=body, headers={"Origin": LOCAL}).status_code == 200
    with TestClient(make_app(folder, cors_origins=(origin,)), base_url=LOCAL) as allowed:
        assert allowed.post("/v1/predict", json=body, headers={"Origin": origin}).status_code == 200


def test_a_body_with_two_lengths_is_refused(client):
    headers = {"Content-Length": "5", "Transfer-Encoding": "chunked", **JSON}
    assert client.post("/v1/predict", content=b"hello", headers=headers).status_code == 400


def test_the_openapi_needs_the_token_where_reads_do(folder):
    with TestClient(make_app(folder, token=TOKEN, token_for_reads=True), base_url=LOCAL) as client:
        assert client.get("/openapi.json").status_code == 401
        assert client.get("/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_one_bad_pack_spoils_neither_the_list_nor_the_search(tmp_path):
    folder = library(tmp_path / "library", 2)
    manifest, header, data = read_parts(folder / "d0.safetensors")
    for place, wrong in (("classes", ["\ud800", "a"]), ("metrics", {"a": "\udfff"}), ("base", "\ud800")):
        write_forged(folder / f"bad-{place}.safetensors", manifest | {place: wrong}, header, data)
    os.mkfifo(folder / "pipe.safetensors")
    for name in (b"a b", b"\xff"):
        (folder / os.fsdecode(name + b".safetensors")).write_bytes((folder / "d0.safetensors").read_bytes())
    (folder / "folder.safetensors").mkdir()
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        listed = client.get("/v1/domains")
        assert listed.status_code == 200
        assert [domain["name"] for domain in listed.json()["domains"]] == ["d0", "d1"]
        rejected = {entry["name"]: entry["reason"] for entry in listed.json()["rejected"]}
        assert rejected.keys() == {"bad-base", "bad-classes", "bad-metrics", "folder", "pipe", "a b", "\\udcff"}
        assert "cannot name a domain" in rejected["a b"]
        assert client.post("/v1/predict/auto", json={"images": [text(picture())]}).status_code == 200


def test_a_forged_upload_is_refused_and_not_stored(tmp_path):
    folder = library(tmp_path / "library", 1)
    manifest, header, data = read_parts(folder / "d0.safetensors")
    write_forged(tmp_path / "forged", manifest | {"metrics": {"accuracy": "\ud800"}}, header, data)
    with TestClient(make_app(folder, token=TOKEN), base_url=LOCAL) as client:
        send = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/octet-stream"}
        reply = client.put("/v1/domains/new", content=(tmp_path / "forged").read_bytes(), headers=send)
        assert reply.status_code == 422
        json.loads(reply.content)
    assert sorted(path.name for path in folder.iterdir()) == ["d0.safetensors"]


def test_warnings_of_pillow_do_not_reach_the_logs(capfd):
    buffer = io.BytesIO()
    image = Image.new("P", (8, 8))
    image.save(buffer, "PNG", transparency=bytes(range(8)))  # Pillow warns of such palettes when it converts them

    async def work(decoders):
        return (await decoders.decode(buffer.getvalue(), SHRINK)).shape

    assert run_with(BOUNDS, work) == (8, 8, 3)
    assert capfd.readouterr().err == ""


def test_a_photograph_of_25_million_pixels_is_taken_within_the_memory_of_a_request():
    usual = Settings(library=Path("library"))
    assert usual.decode_bytes + usual.max_body_bytes < 202_000_000
    bounds = Bounds(max_pixels=usual.max_pixels, seconds=60, memory=usual.decode_bytes)
    jpeg = io.BytesIO()
    Image.new("RGB", (5000, 5000), "green").save(jpeg, "JPEG")

    async def work(decoders):
        return [(await decoders.decode(file, SHRINK)).shape for file in (png(5000, 5000), jpeg.getvalue())]

    assert run_with(bounds, work) == [(64, 64, 3)] * 2


def test_images_of_many_pixels_wait_for_each_other_and_nobody_waits_for_them():
    async def work(decoders):
        async with decoders._costly:  # as if one were being decoded
            large = asyncio.create_task(decoders.decode(png(2500, 2500), SHRINK))
            small = await decoders.decode(picture(), SHRINK)
            await asyncio.sleep(1)
            assert not large.done()
        return small.shape[2], (await large).shape[2]

    assert run_with(BOUNDS, work, most=4) == (3, 3)


def test_what_takes_long_is_tried_again_where_little_else_is_decoded(monkeypatch):
    start = "import polymask.serve.decoding as decoding; decoding._QUICK_SECONDS = 0.001; decoding.main()"
    monkeypatch.setattr(decoding, "_START", start)

    async def work(decoders):
        return (await decoders.decode(png(1900, 1900), SHRINK)).shape

    assert run_with(Bounds(max_pixels=25_000_000, seconds=60, memory=200 << 20), work) == (64, 64, 3)


def request_of(body: bytes) -> Request:
    messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    return Request({"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, receive)


def test_large_bodies_are_parsed_one_at_a_time_and_small_ones_do_not_wait(monkeypatch):
    under_way, most, small_waits = 0, 0, []

    def slowly(data, kind):
        nonlocal under_way, most
        if len(data) < 1000:
            small_waits.append(under_way)
            return PredictBody(domain="d", images=["a"]), [b"a"]
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.2)
        under_way -= 1
        return PredictBody(domain="d", images=["a"]), [b"a"]

    monkeypatch.setattr(requests, "_from_json", slowly)

    async def main():
        lock, settings = asyncio.Lock(), Settings(library=Path("library"))
        bodies = [b"x" * (2 << 20), b"x" * (2 << 20), b"x" * (2 << 20), b"x"]
        reads = (requests.read_body(request_of(b), settings, PredictBody, lambda size: None, lock) for b in bodies)
        return await asyncio.gather(*reads)

    assert len(asyncio.run(main())) == 4
    assert most == 1
    assert small_waits == [1]


def test_nothing_is_done_any_more_for_a_client_that_has_gone():
    ended = []

    async def work():
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(True)

    async def main():
        request = request_of(b"")
        await request.body()
        await app._while_asked(request, work())

    with pytest.raises(Refusal, match="gone away"):
        asyncio.run(main())
    assert ended == [True]
