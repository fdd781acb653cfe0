"""Requests that schemathesis makes up from the OpenAPI: none gets a 500 or an unknown answer."""

import contextlib
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from starlette.testclient import TestClient

from serving import PATIENCE, library, make_app, picture, running

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
    schemathesis = pytest.importorskip(
        "schemathesis", reason="schemathesis is not installed; pip install schemathesis"
    )
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
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
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
    assert max(statuses) < 500
    assert set(statuses) <= {200, 400, 404, 413, 415, 422}
    assert good.status_code == 200
