"""From the words of a command to its verb. Imports no torch, and no verb but the one asked for."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from polymask.cli.verb import Verb


class Verbs(Mapping[str, type[Verb]]):
    """Verbs by name, in the order of the help; each is imported when it is asked for."""

    def __init__(self, **places: tuple[str, str]) -> None:
        self.places = places  # verb -> its module in this package, its class

    def __getitem__(self, name: str) -> type[Verb]:
        module, class_name = self.places[name]
        verb: type[Verb] = getattr(import_module(f"polymask.cli.{module}"), class_name)
        return verb

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


VERBS = Verbs(
    demo=("learn", "Demo"),
    learn=("learn", "Learn"),
    convert=("convert", "Convert"),
    pretrain=("pretrain", "Pretrain"),
    evaluate=("use", "Evaluate"),
    predict=("use", "Predict"),
    list=("packs", "List"),
    show=("packs", "Show"),
    merge=("use", "Merge"),
    export=("export", "Export"),
    push=("push", "Push"),
    methods=("packs", "Methods"),
    account=("packs", "Account"),
    score=("score", "ScoreVerb"),
    benchmark=("benchmark", "Benchmark"),
    serve=("serve", "Serve"),
    report=("report", "Report"),
    completion=("completion", "Completion"),
)
DESCRIPTION = (
    "One pretrained network, many visual domains, about one bit per weight each. "
    "polymask --version [--verbose] says what is installed, for bug reports."
)
_STYLE = (FlagCreatePairsOff, OmitSubcommandPrefixes, OmitArgPrefixes)


def parse(arguments: list[str]) -> Verb:
    """The verb that a command asks for; exits with 2 where the command makes no sense."""
    if arguments and arguments[0] in VERBS.places:
        name, *words = arguments
        verb = VERBS[name]
        alone: Verb = tyro.cli(
            verb,
            prog=f"polymask {name}",
            description=_first_line(verb),
            args=words,
            config=_STYLE,
        )
        return alone
    choices: Any = None
    for name, verb in VERBS.items():
        choice = Annotated[verb, subcommand(name, description=_first_line(verb))]  # type: ignore[valid-type]
        choices = choice if choices is None else choices | choice
    chosen: Verb = tyro.cli(choices, prog="polymask", description=DESCRIPTION, args=arguments, config=_STYLE)
    return chosen


def _first_line(verb: type[Verb]) -> str:
    return (verb.__doc__ or "").strip().splitlines()[0]
