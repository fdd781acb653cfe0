"""The search for what suits each method, on validation and by one rule.

For every value of a ladder (`rate=1e-4,3e-4,1e-3`), and every combination where there are several ladders, a method
learns the named domains with the first seed, for as many epochs as in the runs, from their training images without val;
what it reaches on val after the last epoch counts. The value with the best mean over the domains is chosen, of equals
the one that comes first. Test images are not used. A value at which the loss is not finite is never chosen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from polymask.benchmarks.records import Outcome, Trial, Tuned
from polymask.core.base import Base
from polymask.core.registry import skeleton
from polymask.errors import BenchmarkError
from polymask.train.recipe import Recipe, read_method, read_value, write_value


@dataclass(frozen=True)
class Ladder:
    """A field or an option, and the values to try; for one method, or ("") for all."""

    method: str
    field: str
    values: tuple[Any, ...]


def read_ladder(text: str) -> Ladder:
    """The ladder of "rate=1e-4,3e-4", or of "lora:rate=1e-3,3e-3"."""
    where, equals, values = text.partition("=")
    method, _, field = where.rpartition(":")
    found = tuple(read_value(value) for value in values.split(",") if value)
    if not equals or not field or not found:
        raise BenchmarkError(f"{text!r} is not FIELD=VALUE,VALUE,… or METHOD:FIELD=VALUE,…")
    if len(set(found)) < len(found):
        raise BenchmarkError(f"{text!r} has a value twice")
    return Ladder(method, field, found)


def ladders_of(text: str, ladders: Sequence[Ladder]) -> tuple[Ladder, ...]:
    """Those for a method: its own, or else those for all; without fields that its text sets by hand."""
    row = read_method(text)
    own = [ladder for ladder in ladders if ladder.method in (text, row.name)]
    chosen = own or [ladder for ladder in ladders if not ladder.method]
    by_hand = {*row.options, *row.recipe_fields}
    return tuple(ladder for ladder in chosen if ladder.field not in by_hand)


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """A method's text with some more options or fields."""
    return text + "".join(f":{name}={write_value(value)}" for name, value in values.items())


def learns_only_its_head(base: Base, text: str, recipe: Recipe) -> bool:
    """Whether a method learns nothing at the rates that are not the head's."""
    groups = skeleton(base, read_method(text).method(recipe).first_stage(), ["a", "b"]).param_groups()
    return not any(parameters for name, parameters in groups.items() if name != "head")


def choose(
    ladders: Sequence[Ladder],
    domains: Sequence[str],
    seed: int,
    trials: Iterable[tuple[Mapping[str, Any], Sequence[Outcome]]],
) -> Tuned:
    """The search of one method: what each trial reached, and which is chosen."""
    found = tuple(_trial(values, outcomes, domains) for values, outcomes in trials)
    best = max(found, key=lambda trial: -1.0 if trial.mean is None else trial.mean)
    if best.mean is None:
        raise BenchmarkError(f"none of the values {[dict(t.values) for t in found]} gave a finite loss; give others")
    ends = [
        f"{ladder.field}={write_value(best.values[ladder.field])}"
        for ladder in ladders
        if best.values[ladder.field] in _ends(ladder)
    ]
    remark = f"{', '.join(ends)} is at the end of its ladder" if ends else ""
    fields = tuple(ladder.field for ladder in ladders)
    return Tuned(fields, tuple(domains), seed, found, dict(best.values), remark)


def _ends(ladder: Ladder) -> tuple[float, ...]:
    """The smallest and the largest value; words have no ends."""
    numbers = [value for value in ladder.values if isinstance(value, int | float) and not isinstance(value, bool)]
    return (min(numbers), max(numbers)) if 1 < len(numbers) == len(ladder.values) else ()


def trials_of(text: str, ladders: Sequence[Ladder]) -> list[dict[str, Any]]:
    """The combinations of values to try, each known to make sense for the method."""
    if not ladders:
        return []
    names = [ladder.field for ladder in ladders]
    trials = [dict(zip(names, values, strict=True)) for values in product(*(ladder.values for ladder in ladders))]
    for trial in trials:
        read_method(with_values(text, trial))
    return trials


def _trial(values: Mapping[str, Any], outcomes: Sequence[Outcome], domains: Sequence[str]) -> Trial:
    reached: dict[str, float | None] = dict.fromkeys(domains)
    for outcome in outcomes:
        for name, domain in outcome.domains.items():
            reached[name] = domain.test_accuracy
    known = [accuracy for accuracy in reached.values() if accuracy is not None]
    mean = fmean(known) if known and len(known) == len(domains) else None
    return Trial(values=dict(values), accuracy=reached, mean=mean)
