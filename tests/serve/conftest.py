"""A library of one domain, d0, and a client that sees small limits and no exceptions."""

import pytest
from starlette.testclient import TestClient

from serving import LOCAL, library, make_app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return library(tmp_path_factory.mktemp("served") / "library", 1)


@pytest.fixture(scope="module")
def client(folder):
    options = {"max_body_bytes": 1 << 20, "max_pixels": 1_000_000, "max_pack_bytes": 1 << 20}
    app = make_app(folder, max_images=4, **options)
    with TestClient(app, base_url=LOCAL, raise_server_exceptions=False) as client:
        yield client
