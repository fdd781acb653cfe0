"""The page in a real browser: drop an image, read the answer, upload a pack, delete it."""

import pytest

from browser import chromium
from polymask.core.registry import new_domain
from polymask.library.versions import keep_version
from serving import TOKEN, judging_pack, library, make_app, pack, picture, running

pytestmark = pytest.mark.slow
CARDS = "[...document.querySelectorAll('.card')].map((card) => card.dataset.name).join()"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def site(tmp_path, browser):
    with running(make_app(library(tmp_path / "library", 2))) as (_, (host, port)):
        browser.open(f"http://{host}:{port}/")
        browser.wait_for(f"{CARDS} === 'd0,d1'")
        yield browser


@pytest.fixture(params=[1280, 390], ids=["wide", "narrow"])
def page(request, site):
    site.resize(request.param)
    yield site
    wide = site.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], "nothing sticks out"


def test_a_dropped_image_is_answered_by_the_best_domain(page):
    page.drop(picture(), "a.png", "image/png")
    page.wait_for("document.querySelector('.bars')")
    assert page.text("#domain option") == "Auto-detect"
    assert page.text(".answer h2") in ("d0", "d1")
    assert "ms in the server" in page.text(".answer .note")
    shares = page.run("return [...document.querySelectorAll('.bars span:nth-child(2)')].map((s) => s.innerText)")
    assert len(shares) >= 2
    assert sum(float(share.rstrip(" %")) for share in shares) == pytest.approx(100, abs=0.3)
    assert page.run("return document.querySelectorAll('.ranking li').length") == 2
    page.wait_for("document.querySelectorAll('.warm:not(.cold)').length === 2")


def test_a_domain_that_is_picked_answers_itself(page):
    page.drop(picture(), "a.png", "image/png")
    page.wait_for("document.querySelector('.bars')")
    page.click("[data-name=d1] .use")
    page.wait_for("document.querySelector('.answer h2').innerText === 'd1'")
    page.wait_for("!document.querySelector('.ranking')")
    assert page.run("return document.querySelectorAll('.bars li').length") == 3


def test_an_image_can_be_pasted(page):
    page.paste(picture(), "a.png", "image/png")
    page.wait_for("document.querySelector('.bars')")


def test_what_is_no_image_is_said_to_be_none(page):
    page.drop(b"hello", "a.txt", "text/plain")
    assert "not an image" in page.wait_for("document.querySelector('.answer .problem')?.innerText")
    page.drop(b"hello", "a.png", "image/png")
    page.wait_for("document.querySelector('.answer .problem')?.innerText.includes('can be read')")


def test_several_images_are_answered_one_by_one(page, tmp_path):
    files = []
    for i in range(5):
        files.append(tmp_path / f"photo {i}.png")
        files[-1].write_bytes(picture(i) if i != 3 else b"no image at all")
    page.type("#file", "\n".join(map(str, files)))
    page.wait_for("document.querySelectorAll('.several .bars').length === 4")
    names = page.run("return [...document.querySelectorAll('.several h3')].map((h) => h.innerText)")
    assert names == [file.name for file in files]
    assert "can be read" in page.wait_for("document.querySelector('.several li:nth-child(4) .problem')?.innerText")
    assert page.run("return document.querySelectorAll('.several .thumb img').length") == 4
    assert page.text("#invited") == "5 images chosen"
    page.click("[data-name=d1] .use")
    page.wait_for(
        "[...document.querySelectorAll('.several .said .note')].filter((n) => n.innerText === 'd1').length === 4"
    )


def test_an_image_that_the_browser_cannot_show_is_still_answered(page):
    page.drop(picture(kind="TIFF"), "scan.tiff", "image/tiff")
    page.wait_for("document.querySelector('.answer .bars')")
    assert page.wait_for("document.querySelector('#drop .unseen')?.innerText").startswith("TIFF file")
    assert page.run("return document.querySelectorAll('#drop img').length") == 0


def test_a_domain_of_values_answers_with_its_numbers(site, tmp_path):
    from polymask.core.target import ValueTarget
    from serving import BASE

    domain = new_domain(
        BASE, "classifier-only", ["age", "height"], target=ValueTarget(mean=(40.0, 170.0), std=(5.0, 9.0))
    )
    domain.frozen().save(tmp_path / "library" / "people.safetensors")
    site.wait_for(f"{CARDS} === 'd0,d1,people'")
    site.click("[data-name=people] .use")
    site.drop(picture(), "a.png", "image/png")
    site.wait_for("document.querySelectorAll('.answer .ranking li').length === 2")
    assert site.text(".answer .ranking").split()[::2] == ["age", "height"]


def test_an_empty_library_says_how_to_fill_it(browser, tmp_path):
    app = make_app(library(tmp_path / "library", 1))
    with running(app) as (_, (host, port)):
        browser.open(f"http://{host}:{port}/")
        browser.wait_for(f"{CARDS} === 'd0'")
        assert not browser.run("return document.querySelector('#start').checkVisibility()")
        browser.click("[data-name=d0] .delete")
        browser.click("[data-name=d0] .delete")
        browser.wait_for("document.querySelector('#start').checkVisibility()")
        assert "No domains yet" in browser.text("#start")
        assert "polymask learn" in browser.text("#start-command")
        browser.drop(picture(), "a.png", "image/png")
        assert "no domain yet" in browser.wait_for("document.querySelector('.answer .problem')?.innerText")


def test_a_pack_is_uploaded_and_deleted(page, tmp_path):
    pack(tmp_path / "mine.safetensors", classes=4)
    page.type("#pack", str(tmp_path / "mine.safetensors"))
    page.wait_for(f"{CARDS} === 'd0,d1,mine'")
    assert page.text("#status") == "Uploaded mine"
    assert page.text("[data-name=mine] .classes") == "4"
    page.click("[data-name=mine] .delete")
    assert page.text("[data-name=mine] .delete") == "Really delete?"
    page.click("[data-name=mine] .delete")
    page.wait_for(f"{CARDS} === 'd0,d1'")
    assert page.text("#status") == "Deleted mine"
    assert not (tmp_path / "library" / "mine.safetensors").exists()


def test_a_file_that_is_no_pack_is_refused_in_words(page, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"no pack at all, but long enough")
    page.type("#pack", str(tmp_path / "bad.safetensors"))
    page.wait_for("document.querySelector('#status.problem')?.innerText.includes('not a pack')")


def test_a_pack_that_appears_in_the_folder_appears_on_the_page(page, tmp_path):
    pack(tmp_path / "library" / "new.safetensors")
    page.wait_for(f"{CARDS} === 'd0,d1,new'")


def test_the_library_can_be_filtered(page):
    page.type("#filter", "d1")
    page.wait_for(f"{CARDS} === 'd1'")


def test_the_page_can_be_used_with_the_keyboard_alone(site, tmp_path):
    order = []
    for _ in range(8):
        site.press("\ue004")  # tab
        order.append(site.run("return document.activeElement.id || document.activeElement.className"))
    assert order[:2] == ["file", "domain"], "no button before there is an image"
    assert order[2:6] == ["filter", "pack", "use", "delete"]
    (tmp_path / "a.png").write_bytes(picture())
    site.type("#file", str(tmp_path / "a.png"))
    site.wait_for("document.querySelector('.bars')")
    assert site.run("return getComputedStyle(document.querySelector('#drop')).cursor") == "pointer"


def test_names_from_packs_are_shown_as_text(site, tmp_path):
    from nets import trained
    from serving import BASE

    domain = trained(BASE, classes=2)
    domain.classes = ["<img src=x onerror=alert(1)>", "<b>bold</b>"]
    domain.save(tmp_path / "library" / "evil.safetensors")
    site.wait_for(f"{CARDS} === 'd0,d1,evil'")
    site.click("[data-name=evil] .use")
    site.drop(picture(), "a.png", "image/png")
    site.wait_for("document.querySelectorAll('.bars li').length === 2")
    assert "<b>bold</b>" in site.text(".bars")
    assert site.run("return document.querySelectorAll('.bars b, .bars img').length") == 0


def test_a_server_with_a_token_asks_for_it_and_keeps_it(tmp_path, browser):
    pack(tmp_path / "mine.safetensors")
    app = make_app(library(tmp_path / "library", 1), token=TOKEN)
    with running(app) as (_, (host, port)):
        browser.open(f"http://{host}:{port}/")
        browser.wait_for(f"{CARDS} === 'd0'")
        browser.type("#pack", str(tmp_path / "mine.safetensors"))
        browser.wait_for("document.querySelector('#token-dialog').open")
        browser.type("#token", TOKEN)
        browser.click("#token-dialog button")
        browser.wait_for(f"{CARDS} === 'd0,mine'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(site, scheme):
    site.scheme(scheme)
    ratio = site.run("""
      const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3)
        .map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const ground = light(getComputedStyle(document.body).backgroundColor);
      return ["h1", ".note", ".warm", "h3", "dt", ".delete"].map((selector) => {
        const ink = light(getComputedStyle(document.querySelector(selector)).color);
        const [low, high] = [ink, ground].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
      });
    """)
    assert min(ratio) > 4.5


def test_an_unknown_image_is_called_so(tmp_path, browser):
    folder = tmp_path / "library"
    folder.mkdir()
    judging_pack(folder / "judge.safetensors", 1e6)
    with running(make_app(folder)) as (_, (host, port)):
        browser.open(f"http://{host}:{port}/")
        browser.wait_for(f"{CARDS} === 'judge'")
        browser.drop(picture(), "a.png", "image/png")
        browser.wait_for("document.querySelector('.bars')")
        assert browser.text(".answer .unknown").startswith("Unknown")


def test_a_domain_that_was_changed_is_rolled_back_by_a_button(tmp_path, browser):
    folder = library(tmp_path / "library", 1)
    with running(make_app(folder)) as (_, (host, port)):
        browser.open(f"http://{host}:{port}/")
        browser.wait_for(f"{CARDS} === 'd0'")
        assert browser.run("return document.querySelector('[data-name=d0] .back').hidden")
        keep_version(folder / "d0.safetensors")
        pack(folder / "d0.safetensors", classes=4, seed=9)
        browser.open(f"http://{host}:{port}/")
        browser.wait_for("document.querySelector('[data-name=d0] .classes')?.innerText === '4'")
        browser.click("[data-name=d0] .back")
        browser.wait_for("document.querySelector('[data-name=d0] .classes').innerText === '2'")
