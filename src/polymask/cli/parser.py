"""From the words of a command to its verb; completion scripts. Imports no torch, and only the verb that is needed."""

import ast
import inspect
import textwrap
import types
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from polymask.cli.verb import Verb

if TYPE_CHECKING:
    from rich.console import Console


class Verbs(UserDict[str, Any]):
    """Verbs by name, in the order of the help; `data` names their modules, imported when they are needed."""

    def __getitem__(self, name: str) -> type[Verb]:
        verb: type[Verb] = getattr(import_module(f"polymask.cli.{self.data[name]}"), f"{name.capitalize()}Verb")
        return verb


_VERBS_OF = {
    "learn": ("demo", "learn", "pretrain"),
    "convert": ("convert", "merge", "export"),
    "packs": ("list", "show", "evaluate", "predict", "push", "serve"),
    "benchmark": ("benchmark",),
    "report": ("report", "score", "account", "methods"),
    "parser": ("completion",),
}
VERBS = Verbs({verb: module for module, verbs in _VERBS_OF.items() for verb in verbs})
DESCRIPTION = (
    "One pretrained network, many visual domains, about one bit per weight each. "
    "polymask --version [--verbose] says what is installed, for bug reports."
)
_STYLE = (FlagCreatePairsOff, OmitSubcommandPrefixes, OmitArgPrefixes)


def parse(arguments: list[str]) -> Verb:
    """The verb that a command asks for; exits with 2 where the command makes no sense."""
    if arguments and arguments[0] in VERBS:
        name, *words = arguments
        verb = VERBS[name]
        alone: Verb = tyro.cli(verb, prog=f"polymask {name}", description=_first_line(verb), args=words, config=_STYLE)
        return alone
    choices: Any = Union[  # noqa: UP007
        tuple(Annotated[verb, subcommand(name, description=_first_line(verb))] for name, verb in VERBS.items())
    ]
    chosen: Verb = tyro.cli(choices, prog="polymask", description=DESCRIPTION, args=arguments, config=_STYLE)
    return chosen


def _first_line(verb: type[Verb]) -> str:
    return (verb.__doc__ or "").strip().splitlines()[0]


@dataclass(frozen=True)
class Option:
    """One option of a verb, or a positional argument."""

    name: str  # as it is typed, without dashes
    meaning: str
    positional: bool
    is_flag: bool  # takes no value
    words: tuple[str, ...]  # the values that it can have, where they are few


@cache
def options_of(verb: type[Verb]) -> tuple[Option, ...]:
    """All options of a verb, those of nested groups too."""
    return (*_options(verb), Option("help", "Show what the verb takes.", False, True, ()))


def _options(kind: type) -> Iterator[Option]:
    hints, meanings = get_type_hints(kind, include_extras=True), meanings_of(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _options(hint)  # type: ignore[arg-type]
            continue
        positional, value = value_type(hint)
        yield Option(
            name=field.name.replace("_", "-"),
            meaning=meanings.get(field.name, ""),
            positional=positional,
            is_flag=value is bool,
            words=tuple(map(str, get_args(value))) if get_origin(value) is Literal else (),
        )


def value_type(hint: Any) -> tuple[bool, Any]:
    """Whether an option is positional, and the type of its value."""
    positional = get_origin(hint) is Annotated and "Positional" in repr(hint.__metadata__)
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(inner for inner in get_args(hint) if inner is not type(None))
    return positional, hint


def meanings_of(kind: type) -> dict[str, str]:
    """What is written below the fields of a class and of those that it comes from."""
    found: dict[str, str] = {}
    for home in reversed(kind.__mro__):
        if is_dataclass(home) and home.__module__ != "types":  # made ones have no source
            found |= dict(_written_below(home))
    return found


def _written_below(kind: type) -> Iterator[tuple[str, str]]:
    """(field, the string that follows it) in the source of one class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield field.target.id, " ".join(str(after.value.value).split())


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
        lines.append(f"-n __fish_use_subcommand -f -a {name} -d {_quoted(_first_line(verb))}")
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
