"""From the words of a command to its verb; completion scripts. Imports no torch, and only the verb that is needed."""

import io
from collections import UserDict
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from polymask.cli.usage import Misused, Option, complaint, help_text, options_of, summary
from polymask.cli.verb import Verb
from polymask.errors import near_matches

if TYPE_CHECKING:
    from rich.console import Console


class Verbs(UserDict[str, Any]):
    """Verbs by name, in the order of the help; `data` names their modules, imported when they are needed."""

    def __getitem__(self, name: str) -> type[Verb]:
        verb: type[Verb] = getattr(import_module(f"polymask.cli.{self.data[name]}"), f"{name.capitalize()}Verb")
        return verb


_VERBS_OF = {
    "learn": ("learn",),
    "pretrain": ("demo", "pretrain"),
    "convert": ("convert",),
    "export": ("merge", "export"),
    "packs": ("list", "show", "push", "serve"),
    "answers": ("evaluate", "predict"),
    "lifelong": ("calibrate", "extend", "rollback", "bake", "remove"),
    "benchmark": ("benchmark",),
    "report": ("report", "score", "account", "methods"),
    "parser": ("completion",),
}
VERBS = Verbs({verb: module for module, verbs in _VERBS_OF.items() for verb in verbs})
DESCRIPTION = (
    "One pretrained network, many visual domains, about one bit per weight each.\n"
    "polymask --version [--verbose] says what is installed, for bug reports."
)
_ALSO_CALLED = {"train": "learn", "fit": "learn", "eval": "evaluate", "test": "evaluate", "ls": "list"}
_ALSO_CALLED |= {"classify": "predict", "infer": "predict", "info": "show", "inspect": "show"}
_STYLE = (FlagCreatePairsOff, OmitArgPrefixes)


def parse(arguments: list[str]) -> Verb:
    """The verb that a command asks for; raises `Misused` where it makes no sense, and exits after --help."""
    name, *words = arguments or ["--help"]
    if name in ("--help", "-h"):
        print(overview())
        raise SystemExit(0)
    if name not in VERBS:
        meant = near_matches(_ALSO_CALLED.get(name, name), VERBS)
        raise Misused(f"there is no verb {name!r}; {meant} polymask --help lists them")
    verb = VERBS[name]
    if "--help" in words or "-h" in words:
        print(help_text(name, verb))
        raise SystemExit(0)
    words = [word.lower() if word in ("True", "False") else word for word in words]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            found: Verb = tyro.cli(verb, prog=f"polymask {name}", args=words, config=_STYLE)
    except SystemExit as stopped:
        problem = complaint(name, verb, words) or said.getvalue().strip()
        raise Misused(f"{problem}\npolymask {name} --help says more") from stopped
    return found


def overview() -> str:
    """What --help prints: the verbs, a line each."""
    lines = [f"  {name:12}{summary(verb)}" for name, verb in VERBS.items()]
    return "\n".join([DESCRIPTION, "", "usage: polymask VERB …; polymask VERB --help says more", "", *lines])


Shell = Literal["bash", "zsh", "fish"]

_ZSH = """\
# Completion of polymask, for ~/.zshrc:  source <(polymask completion zsh)
whence compdef >/dev/null || { autoload -U compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
_FISH = """\
# Completion of polymask: polymask completion fish > ~/.config/fish/completions/polymask.fish
complete -c polymask -n __fish_use_subcommand -f -l version -d 'Say what is installed'
complete -c polymask -n __fish_use_subcommand -f -l help -d 'List the verbs'
"""
_FISH_DOMAINS = "(for file in library/*.safetensors; basename $file .safetensors; end)"


@dataclass(kw_only=True)
class CompletionVerb(Verb):
    """Print a completion script for a shell."""

    shell: tyro.conf.Positional[Shell]
    """bash, zsh or fish; the script's first line says where it goes."""

    def run(self) -> dict[str, Any]:
        return {"shell": self.shell, "script": SCRIPTS[self.shell]()}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        print(result["script"], end="")  # rich would wrap it


def bash_script() -> str:
    """Completion for bash."""
    cases, values = [], []
    for name, verb in VERBS.items():
        found = options_of(verb)
        named = [option for option in found if not option.positional]
        flags = _lines(f"--{option.name}" for option in named)
        valued = " ".join(f"--{option.name}" for option in named if not option.is_flag)
        places = "DOMAINS" if _takes_domain(found) else _lines(_positional_words(found))
        cases.append(f"    {name}) options=$'{flags}' valued='{valued}' places=$'{places}' ;;")
        for option in named:
            if option.words:
                words = _lines(option.words)
                values.append(f"    '{name} --{option.name}') values=$'{words}' ;;")
    script = (Path(__file__).parent / "completion.bash").read_text()
    script = script.replace("VERBS", _lines([*VERBS, "--help", "--version"]))
    return script.replace("CASES", "\n".join(cases)).replace("VALUES", "\n".join(values))


def zsh_script() -> str:
    """Completion for zsh, which runs bash's."""
    return _ZSH + bash_script().partition("\n")[2]


def fish_script() -> str:
    """Completion for fish."""
    lines = []
    for name, verb in VERBS.items():
        lines.append(f"-n __fish_use_subcommand -f -a {name} -d {_quoted(summary(verb))}")
        found, seen = options_of(verb), f"-n '__fish_seen_subcommand_from {name}'"
        for option in (option for option in found if not option.positional):
            takes = "-f" if option.is_flag else "-r"
            if option.words:
                takes = f"-x -a {_quoted(' '.join(option.words))}"
            meaning = f" -d {_quoted(option.meaning)}" if option.meaning else ""
            lines.append(f"{seen} {takes} -l {option.name}{meaning}")
        if _takes_domain(found):
            lines.append(f"{seen} -a {_quoted(_FISH_DOMAINS)}")
        if words := _positional_words(found):
            lines.append(f"{seen} -f -a {_quoted(' '.join(words))}")
    return _FISH + "".join(f"complete -c polymask {line}\n" for line in lines)


SCRIPTS: dict[str, Callable[[], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}


def _takes_domain(options: tuple[Option, ...]) -> bool:
    """Whether the verb takes the name of a domain in a library."""
    places = {option.name for option in options if option.positional}
    return "pack" in places and any(option.name == "library" for option in options)


def _positional_words(options: tuple[Option, ...]) -> list[str]:
    return [word for option in options if option.positional for word in option.words]


def _lines(words: Any) -> str:
    return "\\n".join(words)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
