"""What those who run the server see: metrics, readiness, the OpenAPI."""

from starlette.testclient import TestClient

from serving import LOCAL, library, make_app, picture, text


def test_metrics_count_requests_images_and_the_cache(folder):
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        for _ in range(3):
            client.post("/v1/predict", json={"domain": "d0", "images": [text(picture())] * 2})
        client.get("/nowhere")
        found = dict(
            line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#")
        )
    assert found['polymask_requests_total{route="/v1/predict",status="200"}'] == "3.0"
    assert found['polymask_requests_total{route="other",status="404"}'] == "1.0"
    assert found["polymask_images_total"] == "6.0"
    assert (found["polymask_cache_misses_total"], found["polymask_cache_hits_total"]) == (
        "1.0",
        "2.0",
    )
    assert float(found["polymask_cache_bytes"]) > 0


def test_a_library_that_vanishes_is_not_ready(tmp_path):
    folder = library(tmp_path / "library", 1)
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        assert client.get("/readyz").status_code == 200
        folder.rename(tmp_path / "elsewhere")
        assert client.get("/readyz").status_code == 503
        assert client.get("/v1/domains").status_code == 503
        assert client.get("/healthz").status_code == 200


def test_the_openapi_knows_every_address_and_both_kinds_of_body(client):
    found = client.get("/openapi.json").json()
    assert set(found["paths"]) == {
        "/v1/predict",
        "/v1/predict/auto",
        "/v1/domains",
        "/v1/domains/{name}",
        "/v1/domains/{name}/rollback",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    content = found["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    assert set(content) == {"multipart/form-data", "application/json"}
