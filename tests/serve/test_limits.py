"""What is too much, too many or too slow is refused, and the server answers on."""

import http.client
import json
import socket
import threading

import numpy as np
import pytest
from starlette.testclient import TestClient

from nets import trained
from polymask.data.split import ArraySplit
from polymask.errors import PolymaskError
from polymask.serve import Settings
from polymask.serve.security import Bodies
from polymask.serve.settings import Refusal
from polymask.train.predict import likeness_note
from serving import BASE, BYTES, JSON, LOCAL, PATIENCE, make_app, picture, running, text


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


def test_bodies_that_are_too_many_at_once_are_refused_as_they_come(folder):
    bodies = Bodies(Settings(library=folder, max_body_bytes=600, max_bodies_bytes=1000))
    with bodies.room() as first, bodies.room() as second:
        first(500)
        second(499)
        with pytest.raises(Refusal) as refused:
            first(2)
        assert refused.value.status == 429
        second(1)
    with bodies.room() as third:
        third(1000)


def test_clients_that_only_announce_large_bodies_keep_no_room_from_others(folder):
    limits = {"max_body_bytes": 1 << 20, "max_bodies_bytes": 1 << 20}
    with running(make_app(folder, **limits)) as (_, address):
        idle = [socket.create_connection(address) for _ in range(4)]
        for one in idle:
            one.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                        b"Content-Length: 1000000\r\n\r\n{")  # fmt: skip
        connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
        connection.request("POST", "/v1/predict", json.dumps({"domain": "d0", "images": [text(picture())]}), JSON)
        assert connection.getresponse().status == 200
        connection.close()
        for one in idle:
            one.close()


def test_a_queue_that_is_full_answers_429_with_a_time(folder):
    app = make_app(folder, max_queue=3)
    body = {"domain": "d0", "images": [text(picture())] * 2}
    with TestClient(app, base_url=LOCAL) as client:
        with app.state.engine.batcher.room_for(2):
            reply = client.post("/v1/predict", json=body)
        assert client.post("/v1/predict", json=body).status_code == 200
    assert reply.status_code == 429
    assert int(reply.headers["Retry-After"]) >= 1


def test_a_request_that_no_empty_queue_could_take_is_not_told_to_come_back(tmp_path):
    domain, images = trained(BASE), ArraySplit("made", np.zeros((2, 20, 20, 3), np.uint8), [0, 1])
    domain.recipe = likeness_note(BASE, images)
    domain.save(tmp_path / "d0.safetensors")
    with TestClient(make_app(tmp_path, max_queue=3), base_url=LOCAL) as client:
        named = client.post("/v1/predict", json={"domain": "d0", "images": [text(picture())] * 4})
        found = client.post("/v1/predict/auto", json={"images": [text(picture())] * 2})  # the base runs on each first
        assert client.post("/v1/predict/auto", json={"images": [text(picture())]}).status_code == 200
    for reply, runs in ((named, 4), (found, 4)):
        assert reply.status_code == 422
        assert "Retry-After" not in reply.headers
        assert f"{runs} runs of networks, 3 are allowed; send fewer images" in reply.json()["error"]


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
