"""The score of both benchmarks, with the interval that rounded accuracies leave open; and the accuracies it is made of.

    S   = sum over domains d of  alpha_d · max(0, E_d^max − E_d)²
    S_p = S / #Params

E_d is the test error in percent, E_d^max twice that of the reference, alpha_d = 1000 / (E_d^max)². So a domain gives
250 points at the reference's accuracy, 1000 without any error, and none from twice the reference's error on.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from polymask.benchmarks.records import Plan, counted
from polymask.benchmarks.suites import BENCHMARKS, DECATHLON, Benchmark, canonical, get_benchmark
from polymask.errors import BenchmarkError


@dataclass(frozen=True)
class Score:
    """A score, and the least and the greatest that the true accuracies may have."""

    benchmark: str
    score: float
    low: float
    high: float
    per_domain: dict[str, float]  # points
    accuracy: dict[str, float]  # percent
    score_per_param: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def score(
    benchmark: str | Benchmark,
    accuracy: Mapping[str, float],
    *,
    reference: Mapping[str, float] | None = None,
    params: float | None = None,
    decimals: int | None = None,
    reference_decimals: int | None = None,
) -> Score:
    """Score accuracies in percent, one for each domain of the benchmark.

    ImageNet-to-Sketch needs `reference`, the accuracies of the individual networks of the same backbone; the decathlon
    has its own. `params` is #Params, the size relative to one network.

    `decimals` says to how many the accuracies are rounded, `reference_decimals` the same of the reference. Each true
    value may then lie half a unit of the last place to either side, and `low` and `high` are the scores at the two
    ends. None stands for exact values.
    """
    if isinstance(benchmark, str):
        benchmark = get_benchmark(benchmark)
    mine = _checked(benchmark.arrange(accuracy, "accuracy"), "accuracy")
    theirs = _reference(benchmark, reference)
    if params is not None and not (math.isfinite(params) and params > 0):
        raise BenchmarkError(f"#Params is {params}; it must be above 0, 1 for one network")
    half = _half_unit(decimals)
    half_reference = 0.0 if benchmark.reference is not None else _half_unit(reference_decimals)
    per_domain = {d: _points(mine[d], theirs[d]) for d in benchmark.domains}
    total = sum(per_domain.values())
    low = sum(_points(mine[d] - half, theirs[d] + half_reference) for d in benchmark.domains)
    high = sum(_points(mine[d] + half, theirs[d] - half_reference) for d in benchmark.domains)
    return Score(benchmark.name, total, low, high, per_domain, mine, None if params is None else total / params)


def _points(accuracy: float, reference: float) -> float:
    """1000 · max(0, 1 − E / E^max)²: the formula above for one domain. It falls as the reference's accuracy rises."""
    error = 100 - min(100.0, max(0.0, accuracy))
    worst = 2 * (100 - min(100.0, max(0.0, reference)))
    if worst == 0:  # only at the end of an interval: any error is too much
        return 0.0
    return 1000 * max(0.0, 1 - error / worst) ** 2


def _reference(benchmark: Benchmark, given: Mapping[str, float] | None) -> dict[str, float]:
    if benchmark.reference is not None:
        if given is not None:
            raise BenchmarkError(
                f"{benchmark.name} is scored against its organisers' networks; leave out the reference"
            )
        return dict(benchmark.reference)
    if given is None:
        raise BenchmarkError(
            f"{benchmark.name} is scored against individual networks of the same backbone; give their accuracies too, "
            'as "reference"'
        )
    found = _checked(benchmark.arrange(given, "reference"), "reference")
    if perfect := [domain for domain, value in found.items() if value == 100]:
        raise BenchmarkError(f"the reference has no error on {perfect[0]}, so nothing can be measured against it")
    return found


def _checked(values: Mapping[str, float], what: str) -> dict[str, float]:
    for domain, value in values.items():
        if not 0 <= value <= 100:
            raise BenchmarkError(f"the {what} on {domain} is {value}; it must be 0 to 100 percent")
    return {domain: float(value) for domain, value in values.items()}


def _half_unit(decimals: int | None) -> float:
    if decimals is None:
        return 0.0
    if decimals < 0:
        raise BenchmarkError(f"{decimals} decimals make no sense; give 0 or more")
    return float(f"5e-{decimals + 1}")


@dataclass(frozen=True)
class RoundedValues:
    """Accuracies in percent by name of domain, and the decimals that they are written with."""

    values: dict[str, float]
    decimals: int


@dataclass(frozen=True)
class Accuracies:
    """What a file says of one system."""

    accuracy: RoundedValues
    reference: RoundedValues | None = None
    params: float | None = None


def read_accuracies(path: str | Path) -> Accuracies:
    """Read `{domain: percent}` or `{"accuracy": {…}, "reference": {…}, "params": 1.17}`.

    A row has the decimals of its longest number, since writers of JSON drop a last zero.
    """
    path = Path(path)
    content = _read(path)
    if "accuracy" not in content:
        content = {"accuracy": content}
    for name in content:
        if name not in ("accuracy", "reference", "params"):
            raise BenchmarkError(
                f'{path}: {name!r} has no meaning beside "accuracy"; there may be "reference" and "params"'
            )
    params = content.get("params")
    if params is not None and not isinstance(params, Decimal):
        raise BenchmarkError(f"{path}: params must be a number, as 1.17")
    accuracy = _rounded(path, content["accuracy"], "accuracy")
    reference = _rounded(path, content["reference"], "reference") if "reference" in content else None
    return Accuracies(accuracy, reference, None if params is None else float(params))


def _rounded(path: Path, content: Any, what: str) -> RoundedValues:
    if not isinstance(content, dict) or not content:
        raise BenchmarkError(f"{path}: {what} must give a percentage for each domain by its name")
    for name, value in content.items():
        if not isinstance(value, Decimal):
            raise BenchmarkError(f"{path}: the {what} of {name!r} must be a number, as 82.4")
    if 0 < max(content.values()) <= 1:
        raise BenchmarkError(f"{path}: no {what} is above 1, so they look like fractions; give percent, 82.4 for 0.824")
    decimals = max(0, *(-int(value.as_tuple().exponent) for value in content.values()))
    return RoundedValues({name: float(value) for name, value in content.items()}, decimals)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"),
            parse_float=Decimal,
            parse_int=Decimal,
            parse_constant=_refuse,
            object_pairs_hook=_no_name_twice,
        )
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise BenchmarkError(f"{path} is not JSON that can be scored: {error}") from error
    if not isinstance(content, dict):
        raise BenchmarkError(f'{path} must be a JSON object, as {{"aircraft": 52.8, …}}')
    return content


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    if len(counts) < len(pairs):
        raise ValueError(f"{counts.most_common(1)[0][0]!r} is there twice")
    return dict(pairs)


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
    known = BENCHMARKS.get(plan.benchmark)
    names = {} if known is None else {column: canonical(known, column) for column in columns}
    whole = known is not None and len(names) == len(known.domains) and set(names.values()) == set(known.domains)
    if whole and known is DECATHLON:
        remark = "The score is measured against the organisers' networks, over all ten domains."
        return Reference(DECATHLON, DECATHLON.reference, whole=True, official=True, remark=remark)
    trouble = _trouble(columns, individual)
    if trouble or individual is None:
        return Reference(None, None, whole, official=False, remark=f"No score: {trouble}")
    scope = counted(len(columns), "domain")
    if known is None:
        scope += f" of {plan.benchmark}, which is not a published benchmark: it compares the rows of this table only"
    elif whole:
        scope = f"all {scope} of {known.name}"
    else:
        lacking = ", ".join(domain for domain in known.domains if domain not in names.values())
        foreign = ", ".join(column for column, domain in names.items() if domain is None)
        told = "; ".join(f"{how} {which}" for how, which in (("without", lacking), ("with", foreign)) if which)
        scope += f", not the {len(known.domains)} of {known.name} ({told}): it cannot be compared with published scores"
    remark = f"The score is measured against the individual networks (finetune) of these runs, over {scope}."
    benchmark = known if known is not None and whole else Benchmark(plan.benchmark, dict.fromkeys(columns, ()))
    return Reference(benchmark, individual, whole, official=False, remark=remark)


def _trouble(columns: Sequence[str], individual: Mapping[str, float] | None) -> str:
    if individual is None:
        return "it is measured against individual networks, and these runs have no finetune. Add it to --methods."
    if lacking := [column for column in columns if column not in individual]:
        return f"the individual networks (finetune) have no accuracy on {', '.join(lacking)} yet."
    if perfect := [column for column in columns if individual[column] == 100]:
        return (
            f"the individual networks (finetune) have no error on {', '.join(perfect)}, so nothing "
            "can be measured against them."
        )
    return ""
