"""Completion scripts, run by the shell that they are for."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from polymask.cli import main
from polymask.cli.parser import SCRIPTS, VERBS, parse
from polymask.cli.usage import options_of

# What the shell does at a press of the tab key, without a terminal.
PRESS_TAB = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
handler="$(complete -p polymask | sed 's/.* -F \\([^ ]*\\) .*/\\1/')"
"$handler" polymask "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "polymask.bash"
    path.write_text(SCRIPTS["bash"]())
    return path


@pytest.fixture
def offered(script, tmp_path):
    """What bash offers after some words."""

    def offer(*words):
        run = subprocess.run(
            ["bash", "-c", f"source {script}\n{PRESS_TAB}", "bash", "polymask", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout.split("\n")[:-1] if run.stdout.strip() else []

    return offer


def test_every_verb_is_offered_and_those_that_begin_as_typed(offered):
    assert set(offered("")) == {*VERBS, "--help", "--version"}
    assert offered("me") == ["merge", "methods"]
    assert offered("--v") == ["--version"]


def test_the_options_of_a_verb_are_offered(offered):
    assert offered("merge", "digits", "--o") == ["--out"]
    assert set(offered("export", "-")) == {
        f"--{option.name}" for option in options_of(VERBS["export"]) if not option.positional
    }
    assert "--weight-decay" in offered("learn", "x", "--weight")


def test_few_values_are_offered_and_files_where_there_are_many(offered):
    assert offered("learn", "x", "--schedule", "") == ["step", "cosine"]
    assert offered("completion", "") == ["bash", "zsh", "fish"]
    assert offered("merge", "x", "--out", "") == []  # the shell's own completion takes over


def test_names_of_domains_are_offered_from_the_library(offered, tmp_path):
    for folder, names in {"library": ["digits", "solar cells"], "other": ["letters"]}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.safetensors").touch()
    assert offered("predict", "") == ["digits", "solar cells"]
    assert offered("predict", "di") == ["digits"]
    assert offered("merge", "--library", "other", "") == ["letters"]
    assert offered("merge", "digits", "--out", "") == []  # a file is wanted, no domain


def test_what_is_offered_is_what_the_parser_takes(capsys):
    """The list of options is read off the dataclasses, not asked of the parser."""
    for name, verb in VERBS.items():
        with pytest.raises(SystemExit):
            parse([name, "--help"])
        said = capsys.readouterr().out
        for option in options_of(verb):
            assert option.positional or f"--{option.name}" in said, (name, option.name)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_says_where_it_goes_and_is_sound(shell, tmp_path, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert f"polymask completion {shell}" in text.splitlines()[0]
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": text}
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(text)
        subprocess.run([shell, "-n", path], check=True, timeout=30)


def test_fish_gets_a_line_for_every_verb_and_option(capsys):
    text = SCRIPTS["fish"]()
    assert all(line.startswith(("complete -c polymask -n ", "#")) for line in text.splitlines())
    for name, verb in VERBS.items():
        assert f"-n __fish_use_subcommand -f -a {name} -d '" in text
        seen = [line for line in text.splitlines() if f"seen_subcommand_from {name}'" in line]
        for option in options_of(verb):
            assert option.positional or any(f"-l {option.name}" in line for line in seen)
    assert text.replace("\\'", "").count("'") % 2 == 0


def test_the_script_is_printed_as_it_is_however_narrow_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == SCRIPTS["bash"]()
    assert str(Path.home()) not in SCRIPTS["bash"]()
