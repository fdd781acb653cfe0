"""`polymask --version`: the report that goes with a bug."""

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import polymask as pm
from polymask.cli import main
from polymask.cli import version as environment

TEMPLATES = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE"


def test_the_first_line_is_the_version_and_torch_is_not_imported():
    code = (
        "import sys; from polymask.cli import main; assert main(['--version']) == 0;"
        "assert not {'torch', 'numpy', 'tyro', 'rich'} & sys.modules.keys()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == f"polymask {pm.__version__}"
    assert platform.python_version() in run.stdout


def test_the_report_names_torch_its_build_and_what_is_installed(capsys):
    import torch

    assert main(["--version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # The metadata of PyPI's wheels has no local part: 2.15.0 is torch 2.15.0+cu132.
    assert found["packages"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert found["torch_build"].startswith("cpu" if torch.version.cuda is None else "cuda")
    assert torch.version.git_version[:12] in found["torch_build"]
    assert found["extras"]["vision"]["pillow"]
    assert found["processor"]["usable_threads"] >= 1
    assert "torch" not in found


def test_verbose_adds_what_torch_says(capsys):
    import torch

    assert main(["--version", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert f"cpu ({torch.backends.cpu.get_cpu_capability()})" in text
    assert any(line.split() == ["threads", str(torch.get_num_threads())] for line in text.split("\n"))


def test_the_report_names_no_path_no_user_and_no_host(capsys):
    assert main(["--version", "--verbose", "--json"]) == 0
    text = capsys.readouterr().out
    for private in (str(Path.home()), str(Path.cwd()), sys.prefix):
        assert private not in text
    for private in (platform.node(), getpass.getuser()):
        assert len(private) < 5 or private not in text


def test_packages_that_are_missing_are_said_to_be(monkeypatch, capsys):
    declared = ["numpy", "no-such-package>=1; extra == 'vision'", "ruff; extra == 'dev'"]
    monkeypatch.setattr(environment, "requires", lambda name: declared)
    assert environment.installation()["extras"] == {"vision": {"no-such-package": None}}
    assert main(["--version"]) == 0
    assert "no-such-package –" in capsys.readouterr().out


def test_the_compiler_is_named_with_its_version(monkeypatch, tmp_path):
    script = tmp_path / "my-c++"
    script.write_text("#!/bin/sh\necho 'my-c++ (Some Distribution) 7.8.9'\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert environment.compiler() == "my-c++ 7.8.9"


def test_without_a_compiler_the_report_says_so(monkeypatch, capsys):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    assert main(["--version"]) == 0
    assert any(line.split(maxsplit=1) == ["compiler", "none found"] for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("form", sorted(TEMPLATES.glob("[!c]*.yml")), ids=lambda path: path.stem)
def test_the_forms_for_issues_are_sound_and_ask_for_it(form):
    asked = yaml.safe_load(form.read_text())
    assert asked.keys() == {"name", "description", "labels", "body"}
    fields = [part["id"] for part in asked["body"]]
    assert len(fields) == len(set(fields))
    (version,) = [part for part in asked["body"] if part["id"] == "version"]
    assert "`polymask --version" in version["attributes"]["label"]
    assert version["validations"]["required"]


@pytest.mark.parametrize("words", [["--version", "--jsn"], ["--version", "show"]])
def test_other_words_make_no_sense(words, capsys):
    assert main(words) == 2
    assert "--version takes --verbose" in capsys.readouterr().err
