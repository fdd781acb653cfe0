"""From the words of a command to its verb. Imports no torch: --help must be quick."""

from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from polymask.cli.benchmarking import Benchmark
from polymask.cli.converting import Convert
from polymask.cli.learning import Demo, Learn
from polymask.cli.packs import Account, List, Methods, Show
from polymask.cli.pretraining import Pretrain
from polymask.cli.reporting import Report
from polymask.cli.scoring import ScoreVerb
from polymask.cli.serving import Serve
from polymask.cli.using import Evaluate, Merge, Predict
from polymask.cli.verb import Verb

VERBS: dict[str, type[Verb]] = {
    "demo": Demo,
    "learn": Learn,
    "convert": Convert,
    "pretrain": Pretrain,
    "evaluate": Evaluate,
    "predict": Predict,
    "list": List,
    "show": Show,
    "merge": Merge,
    "methods": Methods,
    "account": Account,
    "score": ScoreVerb,
    "benchmark": Benchmark,
    "serve": Serve,
    "report": Report,
}


def parse(arguments: list[str] | None) -> Verb:
    """The verb that a command asks for; exits with 2 where the command makes no sense."""
    choices: Any = None
    for name, verb in VERBS.items():
        help_line = subcommand(name, description=_first_line(verb))
        choice = Annotated[verb, help_line]  # type: ignore[valid-type]
        choices = choice if choices is None else choices | choice
    chosen: Verb = tyro.cli(
        choices,
        prog="polymask",
        description="One pretrained network, many visual domains, about one bit per weight each.",
        args=arguments,
        config=(FlagCreatePairsOff, OmitSubcommandPrefixes, OmitArgPrefixes),
    )
    return chosen


def _first_line(verb: type[Verb]) -> str:
    return (verb.__doc__ or "").strip().splitlines()[0]
