"""What the scores of a run are measured against, and whether others' scores are on that measure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polymask.benchmarks.domains import BENCHMARKS, DECATHLON, Benchmark
from polymask.benchmarks.records import Plan
from polymask.errors import BenchmarkError


@dataclass(frozen=True)
class Reference:
    """The benchmark to score by, or None and `remark` says why there is none.

    `whole` holds where the runs have every domain of a published benchmark. `official` holds where
    the reference is its organisers', else it is the individual networks of the runs.
    """

    benchmark: Benchmark | None
    accuracy: Mapping[str, float] | None
    whole: bool
    official: bool
    remark: str


def find_reference(plan: Plan, columns: Sequence[str], individual: Mapping[str, float] | None) -> Reference:
    """Choose the reference for a plan's columns.

    `individual` has the mean accuracies of the individual networks, as far as they are done; None
    where the plan has none.
    """
    whole = is_whole(plan.benchmark, columns)
    if whole and plan.benchmark == DECATHLON.name:
        return Reference(
            DECATHLON,
            DECATHLON.reference,
            whole=True,
            official=True,
            remark="The score is measured against the organisers' networks, over all ten domains.",
        )
    trouble = _trouble(columns, individual)
    if trouble or individual is None:
        return Reference(None, None, whole, official=False, remark=f"No score: {trouble}")
    remark = "The score is measured against the individual networks (finetune) of these runs"
    counted = f"{len(columns)} domain{'s' if len(columns) != 1 else ''}"
    if whole:
        remark += f", over all {len(columns)} domains of {plan.benchmark}."
        benchmark = BENCHMARKS[plan.benchmark]
    else:
        remark += f", over {counted}{_of_how_many(plan.benchmark, columns)}."
        benchmark = Benchmark(plan.benchmark, dict.fromkeys(columns, ()))
    return Reference(benchmark, individual, whole, official=False, remark=remark)


def canonical(benchmark: Benchmark, name: str) -> str | None:
    """What a benchmark calls a domain, or None if it has no such domain."""
    try:
        return benchmark.find(name)
    except BenchmarkError:
        return None


def is_whole(benchmark: str, columns: Sequence[str]) -> bool:
    """Whether the columns are, each once, the domains of a published benchmark."""
    known = BENCHMARKS.get(benchmark)
    if known is None:
        return False
    names = [canonical(known, column) for column in columns]
    return len(names) == len(known.domains) and set(names) == set(known.domains)


def _trouble(columns: Sequence[str], individual: Mapping[str, float] | None) -> str:
    if individual is None:
        return "it is measured against individual networks, and these runs have no finetune. Add it to --methods."
    lacking = [column for column in columns if column not in individual]
    if lacking:
        return f"the individual networks (finetune) have no accuracy on {', '.join(lacking)} yet."
    perfect = [column for column in columns if individual[column] == 100]
    if perfect:
        return (
            f"the individual networks (finetune) have no error on {', '.join(perfect)}, so nothing "
            "can be measured against them."
        )
    return ""


def _of_how_many(name: str, columns: Sequence[str]) -> str:
    known = BENCHMARKS.get(name)
    if known is None:
        return f" of {name}, which is no published benchmark: it compares the rows of this table only"
    names = {column: canonical(known, column) for column in columns}
    lacking = [domain for domain in known.domains if domain not in names.values()]
    foreign = [column for column, domain in names.items() if domain is None]
    told = [f"without {', '.join(lacking)}"] if lacking else []
    told += [f"with {', '.join(foreign)}"] if foreign else []
    return f", not the {len(known.domains)} of {name} ({'; '.join(told)}): it cannot be compared with published scores"
