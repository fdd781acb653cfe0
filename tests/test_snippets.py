"""Every snippet of the README, the front page and the tutorials runs as it stands, page by page, from an empty folder.

A page's snippets run in order in one folder that has the files they name. What trains gets quick settings: a
`polymask` comes first in the PATH that adds them to the command. A snippet that cannot run here is listed with its
reason; one that is neither run nor listed fails.
"""

import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import polymask as pm
from image_folders import draw_image

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("tutorial*.md")), "docs/index.md"]
COMMANDS = ("polymask", "curl", "python", "mkdir", "mv", "cp")

NOT_RUN = {  # what a snippet begins with: why it is not run
    "pip install": "it would change the environment that the tests run in",
    "make ": "for a clone: continuous integration runs make test, and tests/cli/test_demo.py the demo",
    "polymask demo": "six minutes; tests/cli/test_demo.py runs it with fewer images",
    "python -c 'import json; assert": "it asks for an accuracy that a training of seconds may miss",
    "polymask benchmark domains": "it needs a GPU and the weights of ResNet-50",
}
SHOWN = {  # what is not code: how it begins
    "README.md": ["W̃ = "],
    "docs/tutorial.md": ["flowers/\n"],
    "docs/tutorial-serving.md": ['{"domain": "digits"', "bytes = domains"],
    "docs/tutorial-research.md": ["domains/birds/train"],
}
QUICK = {  # options that are added to a verb, so that it takes seconds
    "learn": "--epochs 2 --side 64 --limit 24",
    "convert": "--side 64 --limit 24 --scale-steps 2",
    "benchmark": "--epochs 1 --side 32 --limit 60 --seeds 0",
}


@dataclass(frozen=True)
class Snippet:
    """A fenced piece of Python, or an indented piece of shell or text."""

    kind: str  # python, indented
    text: str

    def commands(self) -> list[str]:
        """The commands of a piece of shell; a backslash joins lines."""
        return [line for line in re.sub(r"\\\n *", "", self.text).splitlines() if line.strip()]


def snippets(page: str) -> Iterator[Snippet]:
    """In the order of the page; fences of other languages (maths) are no snippets."""
    text = (ROOT / page).read_text()
    for part in re.split(r"^(```.*?^```)$", text, flags=re.DOTALL | re.MULTILINE):
        if part.startswith("```"):
            if part.startswith("```python\n"):
                yield Snippet("python", part.removeprefix("```python\n").removesuffix("```"))
            continue
        for block in re.split(r"\n\s*\n", part):
            lines = block.strip("\n").splitlines()
            if lines and lines[0].startswith("    "):
                yield Snippet("indented", "\n".join(line[4:] for line in lines))


def runs(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_is_run_or_listed_with_a_reason(page):
    found = list(snippets(page))
    assert any(snippet.kind == "python" for snippet in found)
    for snippet in found:
        if snippet.kind == "python" or snippet.text.startswith(tuple(SHOWN.get(page, []))):
            continue
        for command in snippet.commands():
            known = command.startswith(tuple(f"{name} " for name in COMMANDS))
            assert known or not runs(command), f"{page}: {command!r} is neither run nor listed"


@pytest.mark.parametrize("page", PAGES)
def test_what_is_listed_is_on_a_page(page):
    texts = [snippet.text for snippet in snippets(page)]
    for beginning in SHOWN.get(page, []):
        assert any(text.startswith(beginning) for text in texts), beginning
    everything = "\n".join((ROOT / name).read_text() for name in PAGES)
    assert all(f"    {beginning}" in everything for beginning in NOT_RUN)


def make_images(folder: Path, *classes: str) -> None:
    for label, name in enumerate(classes):
        for number in range(16):
            draw_image(folder / name / f"{number:03}.png", label, number)


def fill(folder: Path, page: str) -> None:
    """The files that the snippets of a page name."""
    if page in ("README.md", "docs/index.md"):
        make_images(folder / "path/to/images", "daisy", "tulip")
        draw_image(folder / "path/to/photo.jpg", 0, 99)
    if page == "docs/tutorial.md":
        for name in ("flowers", "cars"):
            make_images(folder / name, "daisy", "tulip")
        for file in ("some/photo.jpg", "more/photos/a.jpg", "elsewhere/b.png"):
            draw_image(folder / file, 1, 99)
    if page == "docs/tutorial-serving.md":
        for name in ("flowers", "flowers-2", "cars"):
            make_images(folder / "photos" / name, "daisy", "tulip")
        for name in ("one", "two", "three"):
            draw_image(folder / f"{name}.png", 1, 99)
        (folder / "token.txt").write_text("a-secret-of-the-tutorial\n")
        base = pm.load_base("efficientnet-lite0")
        tuned = pm.new_domain(base, "finetune", ["daisy", "tulip"]).merged(base).state_dict()
        moved = {name: t * (1 + 0.01 * torch.rand_like(t)) if t.ndim > 1 else t for name, t in tuned.items()}
        torch.save(moved, folder / "cars.pth")
        digits = pm.new_domain(base, "classifier-only", list("0123456789"))
        digits.save(folder / "library" / "digits.safetensors")  # one that the demo would make


class Terminal:
    """A bash in a folder, whose polymask is ours with quick settings; it may have one server in the background."""

    def __init__(self, folder: Path, tools: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        cases = "\n".join(f'{verb}) set -- "$@" {options} ;;' for verb, options in QUICK.items())
        cases += f'\nserve) set -- "$@" --port {self.port} ;;'
        self._script(tools / "polymask", f'case "$1" in\n{cases}\nesac\nexec {sys.executable} -m polymask "$@"')
        self._script(tools / "python", f'exec {sys.executable} "$@"')
        self._script(
            tools / "curl",
            f'exec /usr/bin/env -S PATH="{os.environ["PATH"]}" curl -sSf --retry 5 '
            f'"${{@/localhost:8000/localhost:{self.port}}}"',
        )
        self.env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.server: subprocess.Popen | None = None

    def _script(self, path: Path, code: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{code}\n")
        path.chmod(0o755)

    def run(self, command: str) -> str:
        """What a command prints; a server stays until the next one, or the end."""
        if command.startswith("polymask serve"):
            self.close()
            self._serve(command)
            return ""
        given = {"cwd": self.folder, "env": self.env, "text": True, "timeout": 900}
        done = subprocess.run(["bash", "-c", command], capture_output=True, **given)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-3000:]}"
        return done.stdout

    def _serve(self, command: str) -> None:
        log = self.folder / "server.log"
        with log.open("w") as file:
            words = shlex.split(command, comments=True)
            words[0] = str(Path(self.env["PATH"].split(":")[0]) / "polymask")
            self.server = subprocess.Popen(words, cwd=self.folder, env=self.env, stderr=file)
        end = time.monotonic() + 120
        while "serving " not in log.read_text():
            assert self.server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(60)
            self.server = None


@pytest.fixture
def terminal(tmp_path):
    (tmp_path / "home").mkdir()
    found = Terminal(tmp_path / "home", tmp_path / "tools")
    yield found
    found.close()


def quick_python(code: str) -> str:
    """The same code with a recipe of two short epochs."""
    return code.replace('recipe="quick"', 'recipe=pm.get_recipe("quick", epochs=2, side=64)')


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_python_of_a_front_page_runs_from_an_empty_folder(page, tmp_path, monkeypatch, capsys):
    fill(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    code = "\n".join(snippet.text for snippet in snippets(page) if snippet.kind == "python")
    (tmp_path / "page.py").write_text(quick_python(code))
    runpy.run_path(str(tmp_path / "page.py"))
    assert "Prediction(path/to/photo.jpg: " in capsys.readouterr().out
    assert (tmp_path / "library/flowers.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "tutorial" in page])
def test_the_snippets_of_a_tutorial_run_in_order_from_an_empty_folder(page, terminal):
    fill(terminal.folder, page)
    python = []
    for snippet in snippets(page):
        if snippet.kind == "python":
            python.append(quick_python(snippet.text))
            (terminal.folder / "page.py").write_text("\n".join(python))
            terminal.run("python page.py")
        elif not snippet.text.startswith(tuple(SHOWN.get(page, []))):
            for command in filter(runs, snippet.commands()):
                terminal.run(command)
    if page == "docs/tutorial-serving.md":
        assert json.loads((terminal.folder / "new.json").read_text())["test_accuracy"] >= 0
        terminal.run("polymask serve library")
        call = (
            f'from page import predict; print(predict("digits", "one.png", server="http://127.0.0.1:{terminal.port}"))'
        )
        assert "['" in terminal.run(f"python -c {shlex.quote(call)}")
