"""What only a real connection shows: slow clients, unread bodies, drained stops."""

import json
import socket
import time
from contextlib import contextmanager

import pytest

from polymask.serve import process as protocol
from serving import PATIENCE, library, make_app, picture, running, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return library(tmp_path_factory.mktemp("served") / "library", 1)


@contextmanager
def connection(address):
    with socket.create_connection(address, timeout=PATIENCE) as sock:
        yield sock


def read_all(sock):
    """Everything until the other side closes."""
    pieces = []
    try:
        while piece := sock.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def request(body, length=None, target="/v1/predict", method="POST"):
    length = len(body) if length is None else length
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


GOOD = json.dumps({"domain": "d0", "images": [text(picture())]}).encode()


def test_a_client_that_never_ends_its_head_is_left(folder, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with running(make_app(folder)) as (_, address):
        with connection(address) as silent, connection(address) as dripping:
            dripping.sendall(b"GET /healthz HTTP/1.1\r\n")
            assert read_all(silent) == b""
            assert read_all(dripping) == b""
        with connection(address) as good:
            good.sendall(request(GOOD))
            assert read_all(good).startswith(b"HTTP/1.1 200")


def test_a_client_that_never_ends_its_body_gets_408(folder):
    with (
        running(make_app(folder, read_timeout=0.3)) as (_, address),
        connection(address) as slow,
    ):
        slow.sendall(request(GOOD[:20], length=len(GOOD)))
        assert read_all(slow).startswith(b"HTTP/1.1 408")


def test_a_body_that_nobody_will_read_ends_the_connection(folder):
    with (
        running(make_app(folder, max_body_bytes=1000)) as (_, address),
        connection(address) as sock,
    ):
        sock.sendall(request(b"x" * 100, length=10**12))
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()


def test_a_client_that_leaves_in_the_middle_harms_nobody(folder):
    with running(make_app(folder)) as (_, address):
        for _ in range(5):
            with connection(address) as gone:
                gone.sendall(request(GOOD[:50], length=len(GOOD)))
        with connection(address) as good:
            good.sendall(request(GOOD))
            assert read_all(good).startswith(b"HTTP/1.1 200")


def test_a_client_that_never_reads_its_answers_is_left(folder, monkeypatch):
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.3)
    with running(make_app(folder)) as (_, address):
        greedy = socket.socket()
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.settimeout(PATIENCE)
        with greedy:
            greedy.connect(address)
            ask = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
            give_up = time.monotonic() + PATIENCE
            left = False
            while not left and time.monotonic() < give_up:
                try:
                    greedy.sendall(ask * 100)
                except ConnectionError:
                    left = True
            assert left
        with connection(address) as good:
            good.sendall(request(GOOD))
            assert read_all(good).startswith(b"HTTP/1.1 200")


def test_what_is_no_http_gets_400(folder):
    with running(make_app(folder)) as (_, address):
        for noise in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"):
            with connection(address) as sock:
                sock.sendall(noise + b"\r\n\r\n")
                assert read_all(sock).startswith(b"HTTP/1.1 400")


def test_a_server_told_to_stop_answers_what_it_has_begun(folder):
    with running(make_app(folder)) as (server, address), connection(address) as sock:
        sock.sendall(request(GOOD[:50], length=len(GOOD)))
        give_up = time.monotonic() + PATIENCE
        while not server.server_state.tasks and time.monotonic() < give_up:
            time.sleep(0.01)
        server.should_exit = True
        while server.servers[0].is_serving() and time.monotonic() < give_up:
            time.sleep(0.01)
        sock.sendall(GOOD[50:])
        assert read_all(sock).startswith(b"HTTP/1.1 200")
