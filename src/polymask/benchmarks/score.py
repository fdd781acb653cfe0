"""The score of both benchmarks, with the interval that rounded accuracies leave open.

    S   = sum over domains d of  alpha_d · max(0, E_d^max − E_d)²
    S_p = S / #Params

E_d is the test error in percent, E_d^max twice that of the reference, alpha_d = 1000 / (E_d^max)².
So a domain gives 250 points at the reference's accuracy, 1000 without any error, and none from
twice the reference's error on.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from polymask.benchmarks.domains import Benchmark, get_benchmark
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
        """The fields; the score per parameter only where there is one."""
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

    ImageNet-to-Sketch needs `reference`, the accuracies of the individual networks of the same
    backbone; the decathlon has its own. `params` is #Params, the size relative to one network.

    `decimals` says that the accuracies are rounded to so many, `reference_decimals` the same of the
    reference. Each true value may then lie half a unit of the last place to either side, on its
    own, and `low` and `high` are the scores at the two ends. None stands for exact values.
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
    return Score(
        benchmark.name,
        total,
        sum(_points(mine[d] - half, theirs[d] + half_reference) for d in benchmark.domains),
        sum(_points(mine[d] + half, theirs[d] - half_reference) for d in benchmark.domains),
        per_domain,
        mine,
        None if params is None else total / params,
    )


def _points(accuracy: float, reference: float) -> float:
    """1000 · max(0, 1 − E / E^max)²: what the formula above is, for one domain.

    It rises with the accuracy and falls with the reference's.
    """
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
            f"{benchmark.name} is scored against individual networks of the same backbone; give "
            'their accuracies too, as "reference"'
        )
    found = _checked(benchmark.arrange(given, "reference"), "reference")
    for domain, value in found.items():
        if value == 100:
            raise BenchmarkError(f"the reference has no error on {domain}, so nothing can be measured against it")
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
