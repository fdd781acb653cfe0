"""Thousands of hostile requests: no 500, no wrong answer, nothing left behind."""

import concurrent.futures
import contextlib
import gc
import http.client
import json
import random
import socket
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from starlette.testclient import TestClient

import polymask as pm
from polymask.serve import process as protocol
from serving import (
    BYTES,
    JSON,
    LOCAL,
    PATIENCE,
    bomb,
    expected,
    library,
    make_app,
    pack,
    picture,
    running,
    text,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return library(tmp_path_factory.mktemp("served") / "library", 2)


def send_many(operation, mode):
    """Requests for one address, right or wrong ones; the statuses of the answers."""
    asked, known = [], set(operation.definition.raw["responses"])

    @settings(
        max_examples=80,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case):
        reply = case.call(timeout=PATIENCE)
        asked.append(reply.status_code)
        assert reply.status_code < 500, reply.text
        # What no route or parser takes is refused before the OpenAPI has a say.
        assert str(reply.status_code) in known | {"400", "404", "405"}, reply.text

    with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with some
        send()
    return asked


def test_a_thousand_made_up_requests_are_answered_as_the_openapi_says(folder):
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed; pip install schemathesis")
    asked = []
    with running(make_app(folder, max_queue=64)) as (_, (host, port)):
        schema = schemathesis.openapi.from_url(f"http://{host}:{port}/openapi.json")
        for operation in schema.get_all_operations():
            for mode in schemathesis.GenerationMode:
                asked += send_many(operation.ok(), mode)
    assert len(asked) >= 700
    assert 200 in asked


def test_a_thousand_torn_requests_do_no_harm(folder):
    """Good requests with bytes changed, cut out or doubled, as a broken proxy would."""
    draw = random.Random(0)
    form = (
        b'--x\r\nContent-Disposition: form-data; name="domain"\r\n\r\nd0\r\n'
        b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n'
        b"Content-Type: image/png\r\n\r\n" + picture() + b"\r\n--x--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    statuses = []
    app = make_app(folder)
    with TestClient(app, base_url=LOCAL, raise_server_exceptions=False) as client:
        for _ in range(1000):
            body = bytearray(form)
            for _ in range(draw.randint(1, 4)):
                place, length = draw.randrange(len(body)), draw.randint(1, 30)
                change = draw.choice(("flip", "cut", "double"))
                if change == "flip":
                    body[place] ^= 1 << draw.randrange(8)
                elif change == "cut":
                    del body[place : place + length]
                else:
                    body[place:place] = body[place : place + length]
            reply = client.post("/v1/predict", content=bytes(body), headers=headers)
            statuses.append(reply.status_code)
        good = client.post("/v1/predict", content=form, headers=headers)
        assert app.state.engine.batcher.admitted == 0
    assert max(statuses) < 500
    assert set(statuses) <= {200, 400, 404, 413, 415, 422}
    assert good.status_code == 200


class Attack:
    """Clients that mean harm, and one whose answers must stay right."""

    def __init__(self, address, versions):
        self.address, self.versions = address, versions
        self.turns = count()

    def __call__(self, kind):
        return getattr(self, kind)(next(self.turns))

    def predict(self, turn):
        """(status, sha256 of the pack, the answer)."""
        body = json.dumps({"domain": "hot", "images": [text(picture())], "top_k": 9})
        status, content = self._ask("POST", "/v1/predict", body, JSON)
        if status != 200:
            return status, None, None
        found = json.loads(content)
        top = found["images"][0]["top"]
        return status, found["pack"], {one["class"]: one["probability"] for one in top}

    def upload(self, turn):
        body = list(self.versions)[turn % len(self.versions)]
        return self._ask("PUT", "/v1/domains/hot", body, BYTES)[0]

    def delete(self, turn):
        return self._ask("DELETE", "/v1/domains/hot", None, {})[0]

    def no_pack(self, turn):
        body = bytearray(next(iter(self.versions)))
        body[turn % len(body)] ^= 0xFF
        return self._ask("PUT", "/v1/domains/hot", bytes(body), BYTES)[0]

    def bomb(self, turn):
        body = json.dumps({"domain": "d0", "images": [text(bomb(30_000, 30_000))] * 4})
        return self._ask("POST", "/v1/predict", body, JSON)[0]

    def huge(self, turn):
        """A body far beyond the limit, which says so or not."""
        with contextlib.suppress(OSError):
            return self._ask("POST", "/v1/predict", iter([b"x" * 65536] * 64), JSON)[0]

    def slow(self, turn):
        """A head or a body that never ends; the server hangs up."""
        head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n"
        body = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        with socket.create_connection(self.address, timeout=PATIENCE) as sock:
            sock.sendall(head + (body if turn % 2 else b""))
            with contextlib.suppress(ConnectionResetError):
                return int((sock.recv(4096) or b"HTTP/1.1 408")[9:12])

    def _ask(self, method, target, body, headers):
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        try:
            connection.request(method, target, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


def holdings():
    """What this process holds: open files, threads, bytes in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), 4096 * pages


def test_hostile_clients_at_once_get_no_500_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    folder = library(tmp_path / "library", 1)
    versions, right = {}, {}
    for classes in (2, 3, 4):
        path = tmp_path / f"{classes}.safetensors"
        versions[pack(path, classes=classes, seed=classes)] = classes
        names = [f"class {i}" for i in range(classes)]
        probabilities = expected(path, [picture()])[0].tolist()
        right[pm.inspect(path).manifest.sha256] = dict(zip(names, probabilities, strict=True))
    app = make_app(folder, read_timeout=0.5, max_body_bytes=1 << 20, max_pack_bytes=1 << 20)
    kinds = ["predict"] * 6 + ["upload", "upload", "delete", "no_pack", "bomb", "huge", "slow"]
    with running(app) as (_, address):
        attack = Attack(address, versions)

        def storm(requests):
            draw = random.Random(requests)
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                return list(pool.map(attack, (draw.choice(kinds) for _ in range(requests))))

        storm(800)  # pools fill up, and the allocator's arenas
        before = holdings()
        replies = storm(800)
        give_up = time.monotonic() + PATIENCE
        while (after := holdings())[:2] > before[:2] and time.monotonic() < give_up:
            time.sleep(0.1)  # connections that are being closed
        assert app.state.engine.batcher.admitted == 0
        assert attack._ask("GET", "/readyz", None, {})[0] == 200
    answers = [reply for reply in replies if isinstance(reply, tuple)]
    statuses = {reply for reply in replies if isinstance(reply, int)} | {a[0] for a in answers}
    assert statuses <= {200, 201, 204, 404, 408, 413, 422, 429}
    said = [(sha256, found) for status, sha256, found in answers if status == 200]
    assert len(said) > 50
    for sha256, found in said:
        assert found == pytest.approx(right[sha256], abs=1e-5)
    assert after[0] <= before[0] + 8, "files are open"
    assert after[1] <= before[1] + 8, "threads are running"
    assert after[2] <= before[2] + (128 << 20), "memory has grown"  # bodies of up to a megabyte, 800 times
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
