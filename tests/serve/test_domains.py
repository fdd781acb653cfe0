"""GET, PUT and DELETE /v1/domains: the folder as it is now."""

import concurrent.futures

import numpy as np
import pytest
from starlette.testclient import TestClient

import polymask as pm
from nets import trained
from polymask.data.images import DomainData
from polymask.data.split import ArraySplit
from polymask.errors import FileError, PackUnavailable
from polymask.files import locked
from polymask.library.versions import keep_version
from serving import BASE, BYTES, LOCAL, expected, library, make_app, pack, picture, text


@pytest.fixture
def folder(tmp_path):
    return library(tmp_path / "library", 2)


@pytest.fixture
def client(folder):
    with TestClient(make_app(folder), base_url=LOCAL) as client:
        yield client


def names(client):
    return [domain["name"] for domain in client.get("/v1/domains").json()["domains"]]


def ask(client, name):
    return client.post("/v1/predict", json={"domain": name, "images": [text(picture())]})


def test_the_list_tells_size_method_accuracy_and_warmth(client, folder):
    ask(client, "d1")
    listed = client.get("/v1/domains").json()
    assert listed["total"] == 2
    assert listed["base"] == {"name": "tiny", "fingerprint": BASE.fingerprint}
    first, second = listed["domains"]
    assert first["bytes"] == (folder / "d0.safetensors").stat().st_size
    assert (first["method"], first["class_count"]) == ("affine-full", 2)
    assert (first["warm"], second["warm"]) == (False, True)


def test_the_list_comes_in_pages(client, folder):
    pack(folder / "d2.safetensors")
    page = client.get("/v1/domains", params={"limit": 2}).json()
    assert [domain["name"] for domain in page["domains"]] == ["d0", "d1"]
    page = client.get("/v1/domains", params={"limit": 2, "after": page["next"]}).json()
    assert [domain["name"] for domain in page["domains"]] == ["d2"]
    assert page["next"] is None


def test_a_domain_shows_its_classes_and_metrics(client, folder):
    domain = trained(BASE, classes=3)
    domain.metrics = {"test_accuracy": 91.5, "confusion": [[1]]}
    domain.save(folder / "noted.safetensors")
    shown = client.get("/v1/domains/noted").json()
    assert shown["classes"] == ["class 0", "class 1", "class 2"]
    assert shown["metrics"] == {"test_accuracy": 91.5}
    assert shown["test_accuracy"] == 91.5
    assert shown["sha256"] == pm.inspect(folder / "noted.safetensors").manifest.sha256


def test_a_pack_dropped_into_the_folder_appears_and_one_removed_vanishes(client, folder):
    pack(folder / "new.safetensors")
    assert names(client) == ["d0", "d1", "new"]
    assert ask(client, "new").status_code == 200
    (folder / "new.safetensors").unlink()
    assert ask(client, "new").status_code == 404
    assert names(client) == ["d0", "d1"]
    assert client.app.state.engine.cache.stats.bytes == 0


def test_an_uploaded_pack_is_served_and_can_be_deleted(client, folder, tmp_path):
    data = pack(tmp_path / "x.safetensors", classes=4)
    reply = client.put("/v1/domains/mine", content=data, headers=BYTES)
    assert reply.status_code == 201
    assert reply.json()["class_count"] == 4
    assert (folder / "mine.safetensors").read_bytes() == data
    assert ask(client, "mine").status_code == 200
    assert client.delete("/v1/domains/mine").status_code == 204
    assert client.delete("/v1/domains/mine").status_code == 404
    assert ask(client, "mine").status_code == 404
    assert not (folder / "mine.safetensors").exists()


def test_replacing_a_pack_changes_the_answers_at_once(client, tmp_path):
    for classes in (3, 4, 5):
        data = pack(tmp_path / "x.safetensors", classes=classes, seed=classes)
        reply = client.put("/v1/domains/mine", content=data, headers=BYTES)
        assert reply.status_code == (201 if classes == 3 else 200)
        answer = ask(client, "mine").json()
        assert answer["pack"] == reply.json()["sha256"]
        assert len(answer["images"][0]["top"]) == classes


def damaged(data, place):
    data = bytearray(data)
    data[place] ^= 0xFF
    return bytes(data)


def test_what_is_no_intact_pack_for_this_base_is_refused_and_leaves_no_trace(client, folder, tmp_path):
    good = pack(tmp_path / "x.safetensors")
    from nets import tiny_base

    other = tiny_base(seed=9)
    trained(other).save(tmp_path / "other.safetensors")
    no_classes = pm.new_domain(BASE, "affine-full", None)
    no_classes.save(tmp_path / "features.safetensors")
    hostile = {
        "nothing": b"",
        "text": b"not a pack",
        "truncated": good[: len(good) // 2],
        "flipped tensor": damaged(good, -5),
        "flipped header": damaged(good, 40),
        "another base": (tmp_path / "other.safetensors").read_bytes(),
        "no classes": (tmp_path / "features.safetensors").read_bytes(),
    }
    before = sorted(path.name for path in folder.iterdir())
    for what, data in hostile.items():
        reply = client.put("/v1/domains/evil", content=data, headers=BYTES)
        assert reply.status_code == 422, what
        assert str(tmp_path) not in reply.text, what
    assert sorted(path.name for path in folder.iterdir()) == before
    reply = client.put("/v1/domains/d0", content=hostile["truncated"], headers=BYTES)
    assert reply.status_code == 422
    assert ask(client, "d0").status_code == 200, "a failed upload leaves the old pack in place"


def test_a_pack_that_asks_for_huge_images_is_refused(client, tmp_path):
    import dataclasses

    for change in ({"shape": (3, 60000, 60000)}, {"crop": 1e-9}, {"crop": 1e-320}):
        domain = trained(BASE)
        domain.input = dataclasses.replace(BASE.input, **change)
        domain.save(tmp_path / "x.safetensors")
        data = (tmp_path / "x.safetensors").read_bytes()
        assert client.put("/v1/domains/huge", content=data, headers=BYTES).status_code == 422


def test_a_pack_whose_network_gives_no_numbers_is_taken_out_of_service(client, folder):
    import torch

    domain = trained(BASE)
    with torch.no_grad():
        domain.head.weight.fill_(3e38)
        domain.head.bias.fill_(3e38)
    domain.save(folder / "infinite.safetensors")
    assert ask(client, "infinite").status_code == 409
    listed = client.get("/v1/domains").json()
    assert [one["name"] for one in listed["rejected"]] == ["infinite"]
    assert "infinite" not in [one["name"] for one in listed["domains"]]


def test_a_foreign_file_in_the_folder_is_named_with_the_reason(client, folder):
    (folder / "odd.safetensors").write_bytes(b"12345678901234567890")
    (folder / "notes.txt").write_text("no pack")
    listed = client.get("/v1/domains").json()
    assert [domain["name"] for domain in listed["domains"]] == ["d0", "d1"]
    ((name, reason),) = ((one["name"], one["reason"]) for one in listed["rejected"])
    assert name == "odd"
    assert "not a pack" in reason
    assert str(folder) not in reason
    assert ask(client, "odd").status_code == 409
    pack(folder / "odd.safetensors")
    assert ask(client, "odd").status_code == 200


def test_a_half_copied_pack_is_served_once_it_is_whole(client, folder, tmp_path):
    data = pack(tmp_path / "x.safetensors")
    (folder / "slow.safetensors").write_bytes(data[: len(data) // 2])
    assert ask(client, "slow").status_code == 409
    (folder / "slow.safetensors").write_bytes(data)
    assert ask(client, "slow").status_code == 200


def test_uploads_deletions_and_predictions_of_one_name_at_once_never_mix(folder, tmp_path):
    versions = {}
    for classes in (2, 3, 4):
        data = pack(tmp_path / f"{classes}.safetensors", classes=classes, seed=classes)
        sha256 = pm.inspect(tmp_path / f"{classes}.safetensors").manifest.sha256
        versions[sha256] = data, classes
    app = make_app(folder, window=0.001)
    seen = []
    with TestClient(app, base_url=LOCAL) as client:
        expected = {}
        for sha256, (data, _) in versions.items():
            client.put("/v1/domains/hot", content=data, headers=BYTES)
            expected[sha256] = ask(client, "hot").json()["images"]

        def disturb(turn):
            data, _ = list(versions.values())[turn % 3]
            if turn % 5 == 4:
                return client.delete("/v1/domains/hot").status_code
            return client.put("/v1/domains/hot", content=data, headers=BYTES).status_code

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            work = []
            for turn in range(60):
                work.append(pool.submit(disturb, turn) if turn % 3 == 0 else pool.submit(ask, client, "hot"))
            replies = [one.result() for one in work]
    for reply in replies:
        if isinstance(reply, int):
            assert reply in (200, 201, 204, 404, 429)
            continue
        if reply.status_code == 503:  # on a busy machine: replaced at every look, and the client is told to come again
            assert "changes too fast" in reply.text
            assert reply.headers["retry-after"] == "1"
            continue
        assert reply.status_code in (200, 404), reply.text
        if reply.status_code == 200:
            answer = reply.json()
            seen.append(answer["pack"])
            for image, want in zip(answer["images"], expected[answer["pack"]], strict=True):
                assert [g["class"] for g in image["top"]] == [g["class"] for g in want["top"]]
                for found, wanted in zip(image["top"], want["top"], strict=True):
                    assert found["probability"] == pytest.approx(wanted["probability"], abs=1e-5)
    assert seen
    leftovers = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert leftovers == []


def test_old_leftovers_of_uploads_are_removed_at_the_start_and_young_ones_are_not(folder):
    import os

    old, young = (folder / f".x.upload-{age}.safetensors.tmp" for age in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    with TestClient(make_app(folder), base_url=LOCAL):
        assert not old.exists()
        assert young.exists()


def test_a_domain_that_was_changed_is_rolled_back_over_http(client, folder):
    path = folder / "d0.safetensors"
    before = pm.inspect(path).manifest.sha256
    assert client.get("/v1/domains/d0").json()["versions"] == []
    assert client.post("/v1/domains/d0/rollback").status_code == 409
    keep_version(path)
    pack(path, classes=4, seed=9)
    assert client.get("/v1/domains").json()["domains"][0]["versions"] == [1]
    assert len(ask(client, "d0").json()["images"][0]["top"]) == 4
    shown = client.post("/v1/domains/d0/rollback").json()
    assert (shown["sha256"], shown["class_count"]) == (before, 2)
    assert len(ask(client, "d0").json()["images"][0]["top"]) == 2
    reply = client.post("/v1/domains/d0/rollback", params={"to": 9})
    assert (reply.status_code, str(folder) in reply.text) == (409, False)
    assert client.post("/v1/domains/nobody/rollback").status_code == 404


def test_while_a_domain_is_extended_and_rolled_back_every_answer_is_that_of_one_version(client, folder):
    path = folder / "d0.safetensors"
    domain = pm.load_domain(path, BASE)
    known = {pm.inspect(path).manifest.sha256: expected(path, [picture()])}
    images = DomainData("made", ("new", "newer"), *(noise_split(seed) for seed in range(3)))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = pm.extend(BASE, domain, images)
        asked = [pool.submit(ask, client, "d0") for _ in range(30)]
        for _ in range(3):
            keep_version(path)
            found.domain.save(path)
            known[pm.inspect(path).manifest.sha256] = expected(path, [picture()])
            asked += [pool.submit(ask, client, "d0") for _ in range(10)]
            pm.rollback(path, 1)
            asked += [pool.submit(ask, client, "d0") for _ in range(10)]
        replies = [one.result() for one in asked]
    assert len(known) == 2
    for reply in replies:
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        shares = {guess["class"]: guess["probability"] for guess in answer["images"][0]["top"]}
        wanted = known[answer["pack"]][0]
        assert len(shares) == len(wanted)
        assert sorted(shares.values()) == pytest.approx(sorted(wanted.tolist()), abs=1e-5)


def noise_split(seed):
    draw = np.random.default_rng(seed)
    return ArraySplit("noise", draw.integers(0, 256, (12, 20, 20, 3), dtype=np.uint8), np.arange(12) % 2)


def test_a_pack_that_could_not_be_read_for_a_while_is_served_again(client, folder, monkeypatch):
    from polymask.pack import format as packs
    from polymask.serve import library as served

    def busy(path):
        raise PackUnavailable(f"{path} cannot be read: Too many open files")

    pack(folder / "new.safetensors")
    monkeypatch.setattr(served, "inspect", lambda path: busy(path) if path.stem == "new" else packs.inspect(path))
    reply = ask(client, "new")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    (unread,) = client.get("/v1/domains").json()["rejected"]
    assert unread["name"] == "new"
    assert "Too many open files" in unread["reason"]
    monkeypatch.setattr(served, "inspect", packs.inspect)
    assert ask(client, "new").status_code == 200
    assert client.get("/v1/domains").json()["rejected"] == []


def test_a_damaged_pack_is_replaced_by_a_good_upload(client, folder, tmp_path):
    good = pack(tmp_path / "x.safetensors")
    (folder / "mine.safetensors").write_bytes(damaged(good, len(good) // 2))
    assert client.put("/v1/domains/mine", content=good, headers=BYTES).status_code == 200
    assert ask(client, "mine").status_code == 200


def test_a_pack_is_not_put_in_the_place_of_its_own_source(client, folder, tmp_path):
    sources = {"d0": pm.load_domain(folder / "d0.safetensors", BASE)}
    mixed = pm.new_domain(BASE, pm.create_method("affine-mix").drawing_on(sources), ["a", "b"])
    mixed.method.draw_on(mixed, list(sources.values()))
    mixed.frozen().save(folder / "mixed.safetensors")
    before, data = (folder / "d0.safetensors").read_bytes(), (folder / "mixed.safetensors").read_bytes()
    reply = client.put("/v1/domains/d0", content=data, headers=BYTES)
    assert reply.status_code == 422
    assert "cannot draw on the one that it replaces" in reply.json()["error"]
    assert (folder / "d0.safetensors").read_bytes() == before


def test_a_deleted_domain_leaves_no_images_and_no_versions_behind(client, folder):
    (folder / "d0.exemplars").write_bytes(b"images")
    keep_version(folder / "d0.safetensors")
    keep_version(folder / "d1.safetensors")
    assert client.delete("/v1/domains/d0").status_code == 204
    assert sorted(path.name for path in folder.iterdir()) == ["d1.safetensors", "d1@1.version"]


def test_what_another_process_is_changing_is_not_changed_and_the_client_may_come_back(client, folder, tmp_path):
    path, data = folder / "d0.safetensors", pack(tmp_path / "x.safetensors", classes=4)
    keep_version(path)
    before = pack(path, classes=3, seed=9)
    with locked(path):
        replies = [
            client.put("/v1/domains/d0", content=data, headers=BYTES),
            client.delete("/v1/domains/d0"),
            client.post("/v1/domains/d0/rollback"),
        ]
        assert path.read_bytes() == before
    for reply in replies:
        assert (reply.status_code, reply.headers["retry-after"]) == (409, "5")
        assert "d0 is being changed by another process" in reply.json()["error"]
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    assert (folder / "d0@1.version").is_file()
    assert client.put("/v1/domains/d0", content=data, headers=BYTES).status_code == 200
    assert path.read_bytes() == data


def test_a_rollback_for_which_there_is_no_room_says_so(client, folder, monkeypatch):
    def full(path, data):
        raise FileError(f"{path} cannot be written: No space left on device")

    path = folder / "d0.safetensors"
    keep_version(path)
    now = pack(path, classes=4, seed=9)
    monkeypatch.setattr("polymask.library.versions.write_atomically", full)
    reply = client.post("/v1/domains/d0/rollback")
    assert (reply.status_code, "No space left" in reply.text, str(folder) in reply.text) == (507, True, False)
    assert path.read_bytes() == now
