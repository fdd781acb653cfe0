"""What is too much, too many or too slow is refused, and the server answers on."""

import threading

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from polymask.errors import PolymaskError
from polymask.serve import Settings
from polymask.serve.security import Bodies
from polymask.serve.settings import Refusal
from serving import BYTES, JSON, LOCAL, make_app, picture, text


def still_answers(client):
    reply = client.post("/v1/predict", json={"domain": "d0", "images": [text(picture())]})
    return reply.status_code == 200


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
    release = threading.Event()
    app = make_app(folder, timeout=0.05)
    monkeypatch.setattr(app.state.engine.library, "load", lambda entry: release.wait(20))
    with TestClient(app, base_url=LOCAL) as client:
        reply = client.post("/v1/predict", json={"domain": "d0", "images": [text(picture())]})
        release.set()
    assert reply.status_code == 503
    assert "Retry-After" in reply.headers


def test_settings_that_make_no_sense_are_refused(tmp_path):
    for wrong in ({"max_queue": 0}, {"timeout": -1.0}, {"token_for_reads": True}):
        with pytest.raises(PolymaskError):
            Settings(library=tmp_path, **wrong)
    with pytest.raises(PolymaskError, match="no library"):
        make_app(tmp_path / "missing")
