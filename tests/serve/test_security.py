"""Who may do what: names, tokens, hosts, origins; and what answers and logs give away."""

import json
import logging

import pytest
from starlette.testclient import TestClient

from polymask.errors import PolymaskError
from polymask.serve.settings import read_token
from serving import BYTES, LOCAL, TOKEN, make_app, pack, picture, text

BEARER = {"Authorization": f"Bearer {TOKEN}"}


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


@pytest.mark.parametrize("name", ["../d0", "..\\d0", "/etc/passwd", "d0\0", ".d0", "d0.safetensors/.."])
def test_a_prediction_cannot_name_a_file_elsewhere(client, name):
    body = {"domain": name, "images": [text(picture())]}
    assert client.post("/v1/predict", json=body).status_code == 404


def test_a_pack_must_come_as_bytes(client):
    for kind in ("text/html", "multipart/form-data; boundary=x", "application/json"):
        reply = client.put("/v1/domains/x", content=b"x", headers={"Content-Type": kind})
        assert reply.status_code == 415


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
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers
        reply = client.get("/v1/domains", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in reply.headers
    app = make_app(folder, cors_origins=("https://a.example",))
    with TestClient(app, base_url=LOCAL) as client:
        assert client.options("/v1/domains/x", headers=ask).status_code == 200
        ask["Origin"] = "https://b.example"
        assert client.options("/v1/domains/x", headers=ask).status_code == 403


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


@pytest.mark.parametrize("content", ["", "short", "two words in one line of it", "x" * 600, "é" * 20])
def test_a_token_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "token").write_text(content, encoding="utf-8")
    with pytest.raises(PolymaskError):
        read_token(tmp_path / "token")
    with pytest.raises(PolymaskError, match="cannot be read"):
        read_token(tmp_path / "missing")
