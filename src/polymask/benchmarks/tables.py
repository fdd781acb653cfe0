"""A benchmark's runs as a table: a row for each method, accuracies over seeds, sizes, scores.

Needs no torch. Accuracies are in percent. A number over seeds is a mean with the sample's standard
deviation, sqrt(sum of (x − mean)² / (n − 1)), which one seed does not have.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from polymask.benchmarks.records import DomainOutcome, Movement, Outcome, Plan, Runs, label_of, movement, still_remark
from polymask.benchmarks.score import Reference, Score, find_reference, score
from polymask.errors import BenchmarkError


@dataclass(frozen=True)
class Statistic:
    """A mean over n seeds and its standard deviation, None for one seed."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """One method, and one direction where the order of domains matters.

    `values` has what each seed reached on each column. `score` is that of the mean accuracies, as
    papers give it; `score_by_seed` is over the scores of the seeds. Both need every column.
    `mean_by_seed` is over the seeds that have every domain of the plan.
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
        """What must stand beside its accuracies."""
        return still_remark(self.still, sum(bool(self.found_on(domain)) for domain in self.values))

    def found_on(self, domain: str) -> dict[int, DomainOutcome]:
        """What each seed found on a domain."""
        return {o.seed: o.domains[domain] for o in self.outcomes if domain in o.domains}

    @property
    def moves_base(self) -> bool:
        """Whether its runs moved the base's weights."""
        return any(outcome.base_after is not None for outcome in self.outcomes)

    @property
    def score_per_param(self) -> float | None:
        """The score over #Params."""
        return None if self.score is None else self.score.score_per_param

    def overhead(self, domains: int) -> float | None:
        """Bits that each of `domains` domains adds, over the base's weights, as #Params has it."""
        return None if self.params is None else max(0.0, 32 * (self.params - 1) / domains)


@dataclass(frozen=True)
class ResultTable:
    """All rows, in the plan's order, and what a reader must know of their scores."""

    plan: Plan
    columns: tuple[str, ...]  # the base's own domain, where its accuracy is known; the plan's
    rows: tuple[Row, ...]
    reference: Reference
    missing: tuple[str, ...]  # what is not done, in words
    left_out: int  # results of methods or seeds that the plan does not name

    @property
    def own(self) -> str | None:
        """The column of the base's own domain."""
        return self.columns[0] if len(self.columns) > len(self.plan.domains) else None

    def row(self, method: str, direction: str = "") -> Row | None:
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
    columns = (*_own_column(plan), *plan.domains)
    rows = []
    for method in plan.methods:
        found = [o for o in known if o.method == method]
        for direction in sorted({o.direction for o in found}) or [""]:
            part = tuple(o for o in found if o.direction == direction)
            rows.append(_row(plan, columns, method, direction, part))
    reference = find_reference(plan, columns, _individual(rows))
    return ResultTable(
        plan,
        columns,
        tuple(_scored(row, reference) for row in rows),
        reference,
        tuple(_missing(plan, rows)),
        len(runs.outcomes) - len(known),
    )


def _own_column(plan: Plan) -> tuple[str, ...]:
    known = plan.own is not None and plan.own_accuracy is not None and plan.own not in plan.domains
    return (plan.own,) if known and plan.own is not None else ()


def _row(plan: Plan, columns: tuple[str, ...], method: str, direction: str, found: tuple[Outcome, ...]) -> Row:
    values: dict[str, dict[int, float]] = {column: {} for column in columns}
    for outcome in found:
        for domain, one in outcome.domains.items():
            if domain in plan.domains and one.test_accuracy is not None:
                values[domain][outcome.seed] = one.test_accuracy
    accuracy = {domain: statistic(by_seed.values()) for domain, by_seed in values.items()}
    if plan.own is not None and plan.own in _own_column(plan):
        values[plan.own] = _own_values(plan, found)
        accuracy[plan.own] = _own_statistic(values[plan.own], found)
    means = [over_seeds.mean for domain in plan.domains if (over_seeds := accuracy[domain])]
    kept = [one for o in found for name, one in o.domains.items() if name in plan.domains]
    return Row(
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
        statistic(_means_by_seed([values[domain] for domain in plan.domains])),
    )


def _means_by_seed(values: Sequence[Mapping[int, float]]) -> list[float]:
    """The mean over domains of each seed that has them all."""
    whole = set.intersection(*map(set, values))
    return [fmean(by_seed[seed] for by_seed in values) for seed in sorted(whole)]


def _own_values(plan: Plan, found: tuple[Outcome, ...]) -> dict[int, float]:
    """The accuracy on the base's own domain by seed, after the method is through with it."""
    if plan.own_accuracy is None:
        return {}
    if all(outcome.base_after is None for outcome in found):
        return dict.fromkeys((outcome.seed for outcome in found), plan.own_accuracy)
    after: dict[int, list[float]] = {}
    for outcome in found:
        value = None if outcome.base_after is None else outcome.base_after.get("accuracy_after")
        if value is not None:
            after.setdefault(outcome.seed, []).append(value)
    return {seed: fmean(values) for seed, values in after.items()}


def _own_statistic(values: Mapping[int, float], found: tuple[Outcome, ...]) -> Statistic | None:
    """Over seeds where the base moved; else it is one measurement, which has no spread."""
    over_seeds = statistic(values.values())
    if over_seeds is None or any(outcome.base_after is not None for outcome in found):
        return over_seeds
    return replace(over_seeds, sd=None)


def _seconds(plan: Plan, found: tuple[Outcome, ...]) -> float | None:
    """The mean over seeds whose domains are all done."""
    totals = []
    for seed in plan.seeds:
        jobs = [o for o in found if o.seed == seed]
        if {name for job in jobs for name in job.domains} >= set(plan.domains):
            totals.append(sum(job.seconds for job in jobs))
    return fmean(totals) if totals else None


def _individual(rows: Iterable[Row]) -> dict[str, float] | None:
    """The mean accuracies of the individual networks; {} where they are not done, None without."""
    found = [row for row in rows if row.method.partition(":")[0] == "finetune"]
    if not found:
        return None
    best = min(found, key=lambda row: len(row.method))  # the one without options, if there is one
    return {column: one.mean for column, one in best.accuracy.items() if one is not None}


def _scored(row: Row, reference: Reference) -> Row:
    if reference.benchmark is None or any(one is None for one in row.accuracy.values()):
        return row
    means = {column: one.mean for column, one in row.accuracy.items() if one is not None}
    whole = _score(means, reference, row.params)
    seeds = set.intersection(*(set(by_seed) for by_seed in row.values.values()))
    if any(set(by_seed) != seeds for by_seed in row.values.values()) or len(seeds) < 2:
        return replace(row, score=whole)
    by_seed = [
        _score({column: values[seed] for column, values in row.values.items()}, reference, None)
        for seed in sorted(seeds)
    ]
    return replace(row, score=whole, score_by_seed=statistic(one.score for one in by_seed))


def _score(accuracy: Mapping[str, float], reference: Reference, params: float | None) -> Score:
    assert reference.benchmark is not None  # asked above
    given = None if reference.official else reference.accuracy
    return score(reference.benchmark, accuracy, reference=given, params=params)


def _missing(plan: Plan, rows: Iterable[Row]) -> list[str]:
    """Rows that lack something, those that lack all of it together."""
    rows = list(rows)
    told = [text for row in rows if row.outcomes and (text := _lacking(plan, row))]
    nothing = [row.label for row in rows if not row.outcomes]
    return [*told, f"no result yet: {', '.join(nothing)}"] if nothing else told


def _lacking(plan: Plan, row: Row) -> str:
    """Which of a row's seeds are not there, in words."""
    done = {domain: set(row.found_on(domain)) for domain in plan.domains}
    gaps: dict[tuple[int, ...], list[str]] = {}
    for domain in plan.domains:
        lacks = tuple(seed for seed in plan.seeds if seed not in done[domain])
        if lacks:
            gaps.setdefault(lacks, []).append(domain)
    told = []
    for seeds, domains in gaps.items():
        where = "every domain" if len(domains) == len(plan.domains) else ", ".join(domains)
        told.append(f"{where} (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})")
    return f"{row.label}: {', '.join(told)}" if told else ""


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fmean(values) if values else None
