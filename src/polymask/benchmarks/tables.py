"""A benchmark's runs as a table: a row for each method, accuracies over seeds, sizes, scores.

Needs no torch. Accuracies are in percent. A number over seeds is a mean with the sample's standard deviation,
sqrt(sum of (x − mean)² / (n − 1)), which one seed does not have.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from polymask.benchmarks.records import DomainOutcome, Movement, Outcome, Plan, Runs, label_of, movement
from polymask.benchmarks.score import Reference, Score, find_reference, score
from polymask.errors import BenchmarkError
from polymask.train.recipe import write_value


@dataclass(frozen=True)
class Statistic:
    """A mean over n seeds and its standard deviation, None for one seed."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class ResultRow:
    """One method, and one direction where the order of domains matters.

    `values` has what each seed reached on each column. `score` is that of the mean accuracies, as papers give it;
    `score_by_seed` is over the scores of the seeds. Both need every column. `mean_by_seed` is over the seeds that have
    every domain of the plan.
    """

    method: str  # as in the plan
    direction: str
    label: str
    outcomes: tuple[Outcome, ...]
    values: Mapping[str, Mapping[int, float]]  # by column, then by seed
    accuracy: Mapping[str, Statistic | None]  # by column
    mean: float | None  # over the plan's domains, where all are there
    params: float | None  # #Params, the paper's convention
    params_stored: float | None
    pack_bytes: float | None  # of a domain, on average
    bits_per_weight: float | None  # of a domain, on average
    seconds: float | None  # of training, for all domains of a seed
    mean_by_seed: Statistic | None = None
    score: Score | None = None
    score_by_seed: Statistic | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that something is known of."""
        return tuple(sorted({outcome.seed for outcome in self.outcomes}))

    @property
    def moved(self) -> Movement | None:
        """How far its masks moved, over all domains and seeds; None where it has no masks."""
        return movement(one for domain in self.values for one in self.found_on(domain).values())

    @property
    def still(self) -> tuple[str, ...]:
        """The domains where its masks did not move."""
        moved = {domain: movement(self.found_on(domain).values()) for domain in self.values}
        return tuple(domain for domain, one in moved.items() if one is not None and one.is_still)

    @property
    def remark(self) -> str:
        """What a reader must know beside its accuracies."""
        still = self.still
        if not still:
            return ""
        if len(still) == sum(bool(self.found_on(domain)) for domain in self.values):
            return "its masks did not move: it is its norms and head"
        return f"its masks did not move on {', '.join(still)}: there it is its norms and head"

    def found_on(self, domain: str) -> dict[int, DomainOutcome]:
        """What each seed found on a domain."""
        return {o.seed: o.domains[domain] for o in self.outcomes if domain in o.domains}

    @property
    def moves_base(self) -> bool:
        """Whether its runs moved the base's weights."""
        return any(outcome.base_after is not None for outcome in self.outcomes)

    @property
    def whole_score(self) -> float | None:
        return None if self.score is None else self.score.score

    @property
    def score_per_param(self) -> float | None:
        return None if self.score is None else self.score.score_per_param

    def overhead(self, domains: int) -> float | None:
        """Bits that each of `domains` domains adds, over the base's weights, as #Params has it."""
        return None if self.params is None else max(0.0, 32 * (self.params - 1) / domains)


@dataclass(frozen=True)
class ResultTable:
    """All rows, in the plan's order, and what a reader must know of their scores."""

    plan: Plan
    columns: tuple[str, ...]  # the base's own domain, where its accuracy is known; the plan's
    rows: tuple[ResultRow, ...]
    reference: Reference
    missing: tuple[str, ...]  # what is not done, in words
    left_out: int  # results of methods or seeds that the plan does not name

    @property
    def own(self) -> str | None:
        """The column of the base's own domain."""
        return self.columns[0] if len(self.columns) > len(self.plan.domains) else None

    def row(self, method: str, direction: str = "") -> ResultRow | None:
        """The row of a method as the plan writes it."""
        found = (r for r in self.rows if (r.method, r.direction) == (method, direction))
        return next(found, None)


def statistic(values: Iterable[float]) -> Statistic | None:
    """Mean and deviation; None of nothing."""
    values = list(values)
    if not values:
        return None
    return Statistic(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def tabulate(runs: Runs) -> ResultTable:
    """The table of what has been found so far."""
    plan = runs.plan
    if not (plan.methods and plan.domains and plan.seeds):
        raise BenchmarkError(
            f"the plan of {plan.benchmark} on {plan.base} has no methods, domains or seeds; run "
            "`polymask benchmark` again"
        )
    known = [o for o in runs.outcomes if o.method in plan.methods and o.seed in plan.seeds]
    own = None if plan.own_accuracy is None or plan.own in plan.domains else plan.own
    rows = []
    for method in plan.methods:
        found = [o for o in known if o.method == method]
        for direction in sorted({o.direction for o in found}) or [""]:
            part = tuple(o for o in found if o.direction == direction)
            rows.append(_row(plan, own, method, direction, part))
    columns = (*([] if own is None else [own]), *plan.domains)
    reference = find_reference(plan, columns, _individual(rows))
    scored = tuple(_scored(row, reference) for row in rows)
    return ResultTable(plan, columns, scored, reference, tuple(_missing(plan, rows)), len(runs.outcomes) - len(known))


def protocol_of(plan: Plan, row: ResultRow) -> dict[str, Any]:
    """The fields in which a row was trained differently from the plan's recipe.

    What its results say counts; where they say nothing, what the plan says of it.
    """
    asked = {**plan.protocols.get(row.method, {}), **plan.chosen(row.method)}
    trained = next((o.recipe for o in row.outcomes if o.recipe), {})
    known = {name: value for name, value in trained.items() if name in plan.recipe}

    def same(name: str, value: Any) -> bool:  # once they are written down: (4,) is [4]
        return name in plan.recipe and json.dumps(value) == json.dumps(plan.recipe[name])

    return {name: value for name, value in (asked | known).items() if name != "name" and not same(name, value)}


def settings_text(settings: Mapping[str, Any]) -> str:
    """{"rate": 0.001} -> "rate=0.001"."""
    return ", ".join(f"{name}={write_value(value)}" for name, value in settings.items())


def _row(plan: Plan, own: str | None, method: str, direction: str, found: tuple[Outcome, ...]) -> ResultRow:
    values: dict[str, dict[int, float]] = {} if own is None else {own: _own_values(plan, found)}
    values |= {domain: {} for domain in plan.domains}
    for outcome in found:
        for domain, one in outcome.domains.items():
            if domain in plan.domains and one.test_accuracy is not None:
                values[domain][outcome.seed] = one.test_accuracy
    accuracy = {domain: statistic(by_seed.values()) for domain, by_seed in values.items()}
    if own is not None and (over_seeds := accuracy[own]) and all(o.base_after is None for o in found):
        accuracy[own] = replace(over_seeds, sd=None)  # where the base stays it is one measurement, which has no spread
    means = [known.mean for domain in plan.domains if (known := accuracy[domain])]
    kept = [one for o in found for name, one in o.domains.items() if name in plan.domains]
    by_domain = [values[domain] for domain in plan.domains]
    whole = sorted(set.intersection(*map(set, by_domain)))  # seeds that have all domains
    return ResultRow(
        method,
        direction,
        label_of(method, direction),
        found,
        values,
        accuracy,
        fmean(means) if len(means) == len(plan.domains) else None,
        _mean(o.params_paper for o in found),
        _mean(o.params_stored for o in found),
        _mean(one.pack_bytes for one in kept),
        _mean(one.bits_per_weight for one in kept),
        _seconds(plan, found),
        statistic(fmean(by_seed[seed] for by_seed in by_domain) for seed in whole),
    )


def _own_values(plan: Plan, found: tuple[Outcome, ...]) -> dict[int, float]:
    """The accuracy on the base's own domain by seed, at the end of its jobs."""
    if plan.own_accuracy is not None and all(outcome.base_after is None for outcome in found):
        return dict.fromkeys((outcome.seed for outcome in found), plan.own_accuracy)
    after: dict[int, list[float]] = {}
    for outcome in found:
        if (value := (outcome.base_after or {}).get("accuracy_after")) is not None:
            after.setdefault(outcome.seed, []).append(value)
    return {seed: fmean(values) for seed, values in after.items()}


def _seconds(plan: Plan, found: tuple[Outcome, ...]) -> float | None:
    """The mean over seeds whose domains are all done."""
    totals = []
    for seed in plan.seeds:
        jobs = [o for o in found if o.seed == seed]
        if {name for job in jobs for name in job.domains} >= set(plan.domains):
            totals.append(sum(job.seconds for job in jobs))
    return _mean(totals)


def _individual(rows: Iterable[ResultRow]) -> dict[str, float] | None:
    """The mean accuracies of the individual networks; {} where they are not done, None without."""
    found = [row for row in rows if row.method.partition(":")[0] == "finetune"]
    if not found:
        return None
    best = min(found, key=lambda row: len(row.method))  # the one without options, if there is one
    return {column: one.mean for column, one in best.accuracy.items() if one is not None}


def _scored(row: ResultRow, reference: Reference) -> ResultRow:
    benchmark = reference.benchmark
    means = {column: one.mean for column, one in row.accuracy.items() if one is not None}
    if benchmark is None or len(means) < len(row.accuracy):
        return row
    given = None if reference.official else reference.accuracy
    row = replace(row, score=score(benchmark, means, reference=given, params=row.params))
    seeds = sorted(set.union(*map(set, row.values.values())))
    if len(seeds) < 2 or any(len(by_seed) < len(seeds) for by_seed in row.values.values()):
        return row
    by_seed = [{column: values[seed] for column, values in row.values.items()} for seed in seeds]
    scores = [score(benchmark, accuracy, reference=given).score for accuracy in by_seed]
    return replace(row, score_by_seed=statistic(scores))


def _missing(plan: Plan, rows: Iterable[ResultRow]) -> list[str]:
    """Rows that lack something, those that lack all of it together."""
    rows = list(rows)
    told = [text for row in rows if row.outcomes and (text := _lacking(plan, row))]
    nothing = [row.label for row in rows if not row.outcomes]
    return [*told, f"no result yet: {', '.join(nothing)}"] if nothing else told


def _lacking(plan: Plan, row: ResultRow) -> str:
    """Which of a row's seeds are not there, in words."""
    gaps: dict[tuple[int, ...], list[str]] = {}
    for domain in plan.domains:
        if lacks := tuple(seed for seed in plan.seeds if seed not in row.found_on(domain)):
            gaps.setdefault(lacks, []).append(domain)
    told = []
    for seeds, domains in gaps.items():
        where = "every domain" if len(domains) == len(plan.domains) else ", ".join(domains)
        told.append(f"{where} (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})")
    return f"{row.label}: {', '.join(told)}" if told else ""


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fmean(values) if values else None
