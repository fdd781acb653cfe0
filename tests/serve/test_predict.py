"""POST /v1/predict and /v1/predict/auto: what is asked is what is answered."""

import io

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from nets import trained
from polymask.data.preprocess import Preprocess
from polymask.serve.settings import Refusal
from polymask.train.predict import write_likeness
from serving import BASE, LOCAL, encoded, expected, judging_pack, library, make_app, pack, picture, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return library(tmp_path_factory.mktemp("served") / "library")


@pytest.fixture(scope="module")
def client(folder):
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        yield client


def probabilities(answer, classes):
    rows = []
    for image in answer["images"]:
        found = {guess["class"]: guess["probability"] for guess in image["top"]}
        rows.append([found[name] for name in classes])
    return torch.tensor(rows)


def test_a_form_with_images_gets_what_the_classifier_says(client, folder):
    images = [picture(i) for i in range(3)]
    files = [("images", (f"{i}.png", data, "image/png")) for i, data in enumerate(images)]
    reply = client.post("/v1/predict", data={"domain": "d1", "top_k": "3"}, files=files)
    assert reply.status_code == 200, reply.text
    found = probabilities(reply.json(), [f"class {i}" for i in range(3)])
    torch.testing.assert_close(found, expected(folder / "d1.safetensors", images))


def test_json_with_base64_gets_the_same_as_a_form(client):
    data = picture(1, kind="JPEG")
    form = client.post("/v1/predict", data={"domain": "d0"}, files={"image": data}).json()
    body = {"domain": "d0", "images": [text(data)]}
    assert client.post("/v1/predict", json=body).json()["images"] == form["images"]


def test_the_answer_names_the_pack_and_as_many_classes_as_asked_for(client, folder):
    import polymask as pm

    body = {"domain": "d2", "images": [text(picture())], "top_k": 2}
    answer = client.post("/v1/predict", json=body).json()
    assert answer["domain"] == "d2"
    assert answer["pack"] == pm.inspect(folder / "d2.safetensors").manifest.sha256
    (image,) = answer["images"]
    first, second = (guess["probability"] for guess in image["top"])
    assert first >= second
    body["top_k"] = 1000
    (image,) = client.post("/v1/predict", json=body).json()["images"]
    assert len(image["top"]) == 4
    assert sum(guess["probability"] for guess in image["top"]) == pytest.approx(1)


def test_a_second_request_finds_the_domain_warm(tmp_path):
    with TestClient(make_app(library(tmp_path / "x", 1)), base_url=LOCAL) as client:
        body = {"domain": "d0", "images": [text(picture())]}
        warm = [client.post("/v1/predict", json=body).json()["warm"] for _ in range(2)]
    assert warm == [False, True]


def test_a_cache_too_small_for_any_network_still_answers(tmp_path):
    app = make_app(library(tmp_path / "x", 2), cache_bytes=0)
    with TestClient(app, base_url=LOCAL) as client:
        for name in ("d0", "d1", "d0"):
            body = {"domain": name, "images": [text(picture())]}
            assert client.post("/v1/predict", json=body).json()["warm"] is False


def test_memory_of_dropped_networks_is_given_back_now_and_then(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("polymask.serve.engine.give_back_freed_memory", lambda: given.append(1))
    app = make_app(library(tmp_path / "x", 2), cache_bytes=0)
    with TestClient(app, base_url=LOCAL) as client:
        for turn in range(33):
            body = {"domain": f"d{turn % 2}", "images": [text(picture())]}
            assert client.post("/v1/predict", json=body).status_code == 200
    assert len(given) == 2


def test_auto_ranks_every_domain_and_answers_with_the_best(client):
    reply = client.post("/v1/predict/auto", files={"images": picture(5)}, data={"top_k": "1"})
    assert reply.status_code == 200, reply.text
    (image,) = reply.json()["images"]
    assert image["ranking"][0]["domain"] == image["domain"]
    assert {one["domain"] for one in image["ranking"]} == {"d0", "d1", "d2"}
    scores = [one["score"] for one in image["ranking"]]
    assert scores == sorted(scores, reverse=True)
    body = {"domain": image["domain"], "images": [text(picture(5))], "top_k": 1}
    assert client.post("/v1/predict", json=body).json()["images"][0]["top"] == image["top"]


def test_auto_compares_only_the_domains_that_are_named(client):
    body = {"images": [text(picture())], "domains": ["d1", "d0"]}
    (image,) = client.post("/v1/predict/auto", json=body).json()["images"]
    assert {one["domain"] for one in image["ranking"]} == {"d0", "d1"}
    form = client.post("/v1/predict/auto", data={"domains": "d0,d1"}, files={"images": picture()}).json()
    assert form["images"] == [image]


def note_likenesses(folder, directions):
    """Packs x0, x1, … that say what their images look like to the base."""
    folder.mkdir()
    for place, direction in enumerate(directions):
        domain = trained(BASE, classes=place + 2, seed=place)
        domain.recipe = {"likeness": write_likeness(direction)}
        domain.save(folder / f"x{place}.safetensors")
    return folder


def base_feature(data):
    feed = Preprocess(BASE.input)
    with torch.no_grad():
        return BASE.net(feed.batch([feed.piece(Image.open(io.BytesIO(data)).convert("RGB"))]))[0]


def test_auto_goes_by_the_likeness_where_every_pack_has_one(tmp_path):
    images = [picture(0), encoded(Image.new("RGB", (30, 30), "blue"))]
    own = [base_feature(data) for data in images]
    folder = note_likenesses(tmp_path / "x", [own[1], own[0], -own[0]])
    with TestClient(make_app(folder, auto_domains=1), base_url=LOCAL) as client:
        body = {"images": [text(data) for data in images], "top_k": 9}
        answer = client.post("/v1/predict/auto", json=body).json()
        assert answer["rule"] == "likeness"
        assert [image["domain"] for image in answer["images"]] == ["x1", "x0"]
        assert answer["images"][0]["ranking"][0]["score"] == pytest.approx(1, abs=1e-3)
        assert len(answer["images"][0]["ranking"]) == 3
        for image, data in zip(answer["images"], images, strict=True):
            body = {"domain": image["domain"], "images": [text(data)], "top_k": 9}
            assert client.post("/v1/predict", json=body).json()["images"][0]["top"] == image["top"]
        assert client.app.state.engine.cache.stats.misses == 2, "only the best are merged"


def test_auto_takes_the_next_best_domain_if_the_best_turns_out_damaged(tmp_path):
    own = base_feature(picture())
    folder = note_likenesses(tmp_path / "x", [own, own + 0.1 * own.roll(1)])
    data = bytearray((folder / "x0.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "x0.safetensors").write_bytes(data)
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        body = {"images": [text(picture())]}
        (image,) = client.post("/v1/predict/auto", json=body).json()["images"]
        assert [one["domain"] for one in image["ranking"]] == ["x1"]


def test_auto_goes_by_logits_if_one_pack_has_no_likeness(tmp_path):
    folder = note_likenesses(tmp_path / "x", [base_feature(picture())])
    pack(folder / "old.safetensors")
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        body = {"images": [text(picture())]}
        assert client.post("/v1/predict/auto", json=body).json()["rule"] == "logits"
        body["domains"] = ["x0"]
        assert client.post("/v1/predict/auto", json=body).json()["rule"] == "likeness"


def test_the_rule_for_logits_is_the_log_of_the_sum_of_their_exponentials():
    from polymask.serve.engine import by_logits

    scores = by_logits([torch.zeros(2, 4), torch.tensor([[3.0, 0.0], [-3.0, -3.0]])])
    expected = torch.tensor([[4.0, torch.e**3 + 1], [4.0, 2 * torch.e**-3]]).log()
    torch.testing.assert_close(scores, expected)


def test_auto_refuses_more_domains_than_it_may_compare(tmp_path):
    app = make_app(library(tmp_path / "x", 3), auto_domains=2)
    with TestClient(app, base_url=LOCAL) as client:
        reply = client.post("/v1/predict/auto", files={"images": picture()})
        assert reply.status_code == 422
        assert "name up to 2" in reply.json()["error"]
        body = {"images": [text(picture())], "domains": ["d0", "d2"]}
        assert client.post("/v1/predict/auto", json=body).status_code == 200


def test_auto_leaves_out_a_pack_that_turns_out_damaged(tmp_path):
    folder = library(tmp_path / "x", 2)
    data = bytearray((folder / "d1.safetensors").read_bytes())
    data[-1] ^= 1  # of a tensor: the head is still right
    (folder / "d1.safetensors").write_bytes(data)
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        (image,) = client.post("/v1/predict/auto", files={"images": picture()}).json()["images"]
        assert [one["domain"] for one in image["ranking"]] == ["d0"]
        body = {"domain": "d1", "images": [text(picture())]}
        reply = client.post("/v1/predict", json=body)
        assert reply.status_code == 409
        assert "sha256" in reply.json()["error"]


@pytest.mark.parametrize("method", ["piggyback", "finetune", "classifier-only"])
def test_domains_of_other_methods_are_served_too(tmp_path, method):
    pack(tmp_path / "x.safetensors", method=method)
    with TestClient(make_app(tmp_path), base_url=LOCAL) as client:
        body = {"domain": "x", "images": [text(picture())], "top_k": 3}
        reply = client.post("/v1/predict", json=body)
    found = probabilities(reply.json(), [f"class {i}" for i in range(3)])
    torch.testing.assert_close(found, expected(tmp_path / "x.safetensors", [picture()]))


@pytest.mark.parametrize(("threshold", "unknown"), [(1e6, True), (-1e6, False)])
def test_an_answer_says_unknown_with_the_score_where_the_pack_can_tell(tmp_path, threshold, unknown):
    judging_pack(tmp_path / "judge.safetensors", threshold)
    pack(tmp_path / "plain.safetensors")
    with TestClient(make_app(tmp_path), base_url=LOCAL) as client:
        body = {"images": [text(picture())], "top_k": 3}
        (image,) = client.post("/v1/predict", json=body | {"domain": "judge"}).json()["images"]
        assert image["unknown"] is unknown
        assert isinstance(image["score"], float)
        found = probabilities({"images": [image]}, [f"class {i}" for i in range(3)])
        torch.testing.assert_close(found, expected(tmp_path / "judge.safetensors", [picture()]))
        (plain,) = client.post("/v1/predict", json=body | {"domain": "plain"}).json()["images"]
        assert not {"unknown", "score"} & plain.keys()
        (best,) = client.post("/v1/predict/auto", json=body | {"domains": ["judge"]}).json()["images"]
        assert (best["domain"], best["unknown"]) == ("judge", unknown)
        assert client.get("/v1/domains/judge").json()["unknown"]["threshold"] == threshold
        assert client.get("/v1/domains/plain").json()["unknown"] is None


def test_a_rule_of_a_strangers_pack_that_gives_no_numbers_is_not_served(tmp_path):
    import polymask as pm
    from polymask.train.unknown import Observed, fit_unknown

    domain, seen = trained(BASE), Observed(torch.randn(40, 12), torch.randn(40, 3), torch.arange(40) % 3)
    domain.unknown = fit_unknown("mahalanobis", seen, seen)
    domain.unknown.whiten.fill_(3e38)
    domain.save(tmp_path / "odd.safetensors")
    pm.load_domain(tmp_path / "odd.safetensors", BASE)
    with TestClient(make_app(tmp_path), base_url=LOCAL) as client:
        reply = client.post("/v1/predict", json={"domain": "odd", "images": [text(picture())]})
        assert reply.status_code == 409
        assert "not finite" in reply.json()["error"]


@pytest.mark.parametrize(("status", "answered_by"), [(404, "other"), (409, "other"), (429, None), (503, None)])
def test_a_domain_that_is_only_busy_does_not_leave_the_answer_to_another(tmp_path, monkeypatch, status, answered_by):
    for name, direction in (("best", 1.0), ("other", -1.0)):
        domain = trained(BASE)
        domain.recipe = {"likeness": write_likeness(direction * torch.ones(BASE.feature_dim))}
        domain.save(tmp_path / f"{name}.safetensors")
    with TestClient(make_app(tmp_path), base_url=LOCAL) as client:
        engine = client.app.state.engine
        predict, asked = engine._predict, []

        async def busy(name, images):
            asked.append(name)
            if len(asked) == 1:  # the one that fits best
                raise Refusal(status, "not now")
            return await predict(name, images)

        monkeypatch.setattr(engine, "_predict", busy)
        reply = client.post("/v1/predict/auto", json={"images": [text(picture())]})
    assert reply.status_code == (200 if answered_by else status)
    assert len(set(asked)) == (2 if answered_by else 1)
