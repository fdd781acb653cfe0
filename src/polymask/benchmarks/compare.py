"""Who is ahead: two methods, paired by domain and seed, in numbers and in words; all methods, by size and quality.

The difference on a domain is the mean over the seeds that both have, d_i; that of the methods is the mean over domains.
Domains are the units that one generalises over, so ± is the half width of the 95 % interval over them, t · s / sqrt(n)
with n − 1 degrees of freedom. With fewer than three domains it is over seeds, and holds for these domains alone.
Needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

from polymask.benchmarks.records import counted, read_runs
from polymask.benchmarks.tables import ResultRow, ResultTable, tabulate
from polymask.errors import BenchmarkError

LEAST_DOMAINS = 3  # for an interval over domains
_MOST_FLIPS = 16  # units, of which every choice of signs is tried

# Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)

Verdict = Literal["ahead", "behind", "cannot be told apart", "nothing can be said"]


@dataclass(frozen=True)
class Comparison:
    """What one method has more than another, in points of test accuracy.

    `left_out` gives domains where the masks of one of the two did not move, and whose: nothing is concluded from them.
    """

    method: str
    other: str
    by_domain: Mapping[str, float]  # the mean over seeds
    seeds: tuple[int, int]  # that a domain has of both: the fewest, the most
    mean: float | None
    half_width: float | None  # of the 95 % interval; None: too few for one
    over: Literal["domains", "seeds", ""]  # what the interval is over
    p: float | None  # share of all choices of signs whose mean is as far from 0
    left_out: Mapping[str, str]

    @property
    def ahead(self) -> int:  # on how many domains
        return sum(points > 0 for points in self.by_domain.values())

    @property
    def behind(self) -> int:
        return sum(points < 0 for points in self.by_domain.values())

    @property
    def verdict(self) -> Verdict:
        """Where the interval holds 0, the two cannot be told apart."""
        if self.mean is None:
            return "nothing can be said"
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return "cannot be told apart"
        return "ahead" if self.mean > 0 else "behind"

    @property
    def sentence(self) -> str:
        """In plain words, as "a is ahead of b by 0.8 ± 0.5 points (4 of 5 domains; 3 seeds)"."""
        if self.mean is None:
            whose = " and ".join(sorted(set(self.left_out.values())))
            why = f"the masks of {whose} did not move" if whose else "they have no domain and seed in common"
            return f"nothing can be said of {self.method} and {self.other}: {why}"
        verdict, domains = self.verdict, counted(len(self.by_domain), "domain")
        if verdict == "cannot be told apart":
            said = f"{self.method} and {self.other} cannot be told apart: {self.points}"
            part = f"ahead on {self.ahead} of {domains}"
        elif verdict == "ahead":
            said = f"{self.method} is ahead of {self.other} by {self.points.lstrip('+−')}"
            part = f"{self.ahead} of {domains}"
        else:
            said = f"{self.method} is behind {self.other} by {self.points.lstrip('+−')}"
            part = f"{self.behind} of {domains}"
        return f"{said} ({'; '.join([part, self.seeds_text, *self._remarks()])})"

    @property
    def points(self) -> str:
        """The difference and its interval, as "+0.8 ± 0.5 points"."""
        return f"{self.difference} {self.interval} points".replace("  ", " ")

    @property
    def difference(self) -> str:
        if self.mean is None:
            return ""
        rounded = round(self.mean, self._places)
        return f"{rounded:+.{self._places}f}".replace("-", "−") if rounded else "0"

    @property
    def interval(self) -> str:
        return "" if self.half_width is None else f"± {self.half_width:.{self._places}f}"

    @property
    def seeds_text(self) -> str:
        least, most = self.seeds
        return f"{least} to {most} seeds" if least != most else counted(most, "seed")

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "other": self.other,
            "sentence": self.sentence,
            "verdict": self.verdict,
            "difference": self.mean,
            "half_width": self.half_width,
            "interval_over": self.over,
            "p": self.p,
            "domains": len(self.by_domain),
            "ahead": self.ahead,
            "behind": self.behind,
            "seeds": list(self.seeds),
            "by_domain": dict(self.by_domain),
            "left_out": dict(self.left_out),
        }

    @property
    def _places(self) -> int:
        """One decimal, two where one would leave nothing of a number or make the two equal."""
        numbers = [abs(n) for n in (self.mean, self.half_width) if n]
        rounded = {round(n, 1) for n in numbers}
        return 2 if len(rounded | {0.0}) <= len(numbers) else 1

    def _remarks(self) -> list[str]:
        told = {
            "domains": "95 % over domains",
            "seeds": "95 % over seeds, for these domains alone",
            "": "too few domains and seeds for an interval",
        }[self.over]
        whose: dict[str, list[str]] = {}
        for domain, method in self.left_out.items():
            whose.setdefault(method, []).append(domain)
        without = [
            f"without {', '.join(found)}, where the masks of {method} did not move" for method, found in whose.items()
        ]
        return [told, *without]


def compare(table: ResultTable, method: str, other: str) -> Comparison:
    """Compare two methods of one table, named as in its plan, or METHOD-down and METHOD-up."""
    return compare_rows(find_row(table, method), find_row(table, other), method, other)


def compare_pooled(folders: Sequence[str | Path], method: str, other: str) -> Comparison:
    """Compare two methods over the domains of several folders of runs; equal names in two folders are two domains."""
    names = [Path(folder).name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    pairs = {}
    for name, folder in zip(names, folders, strict=True):
        table = tabulate(read_runs(folder))
        prefix = f"{name}/" if len(names) > 1 else ""
        pairs[prefix] = find_row(table, method, name), find_row(table, other, name)
    return _compared(method, other, pairs)


def compare_rows(row: ResultRow, reference: ResultRow, method: str = "", other: str = "") -> Comparison:
    """Compare two rows of a table, under these names or their labels."""
    return _compared(method or row.label, other or reference.label, {"": (row, reference)})


def compare_with(table: ResultTable, other: str) -> tuple[Comparison, ...]:
    """Every row that has results against the row of this method; none where it has no row."""
    reference = table.row(other)
    if reference is None or not reference.outcomes:
        return ()
    rows = [row for row in table.rows if row.outcomes and row is not reference]
    return tuple(compare_rows(row, reference) for row in rows)


def find_row(table: ResultTable, name: str, place: str = "") -> ResultRow:
    """The row that is called so: METHOD, or METHOD-down and METHOD-up where it has both."""
    names = {f"{row.method}-{row.direction}" if row.direction else row.method: row for row in table.rows}
    found = [row for label, row in names.items() if name in (label, row.method)]
    if len(found) != 1:
        many = "several rows" if found else "no row"
        raise BenchmarkError(f"{place or table.plan.benchmark} has {many} {name!r}; it has {', '.join(names)}")
    return found[0]


def _compared(method: str, other: str, pairs: Mapping[str, tuple[ResultRow, ResultRow]]) -> Comparison:
    """From rows of both by what stands before the names of their domains."""
    points: dict[str, dict[int, float]] = {}
    left_out: dict[str, str] = {}
    for prefix, (row, reference) in pairs.items():
        still, other_still = row.still, reference.still
        for domain, values in row.values.items():
            against = reference.values.get(domain, {})
            shared = sorted(set(values) & set(against))
            learned = row.found_on(domain) and reference.found_on(domain)  # not the base's own domain
            if not (shared and learned):
                continue
            if domain in still or domain in other_still:
                left_out[f"{prefix}{domain}"] = method if domain in still else other
            else:
                points[f"{prefix}{domain}"] = {seed: values[seed] - against[seed] for seed in shared}
    by_domain = {domain: fmean(found.values()) for domain, found in points.items()}
    over, units = _units(points, by_domain)
    if over == "seeds":  # the mean is of those that the interval is of
        whole = set.intersection(*map(set, points.values()))
        points = {domain: {seed: found[seed] for seed in sorted(whole)} for domain, found in points.items()}
        by_domain = {domain: fmean(found.values()) for domain, found in points.items()}
    counts = [len(found) for found in points.values()]
    return Comparison(
        method,
        other,
        by_domain,
        (min(counts, default=0), max(counts, default=0)),
        fmean(by_domain.values()) if by_domain else None,
        student(len(units) - 1) * stdev(units) / sqrt(len(units)) if units else None,
        over,
        _sign_flips(units) if units else None,
        left_out,
    )


def _units(
    points: Mapping[str, Mapping[int, float]], by_domain: Mapping[str, float]
) -> tuple[Literal["domains", "seeds", ""], list[float]]:
    """What the interval is over: domains, or with too few of them the seeds that have them all."""
    if len(by_domain) >= LEAST_DOMAINS:
        return "domains", list(by_domain.values())
    whole = set.intersection(*map(set, points.values())) if points else set()
    if len(whole) < 2:
        return "", []
    return "seeds", [fmean(found[seed] for found in points.values()) for seed in sorted(whole)]


def student(freedom: int) -> float:
    """The two-sided 95 % point of Student's t.

    Beyond the table z + (z³ + z) / 4f + (5z⁵ + 16z³ + 3z) / 96f² + …, right to four digits.
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z, f = NormalDist().inv_cdf(0.975), freedom
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)
    return z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2) + third


def _sign_flips(units: Sequence[float]) -> float | None:
    """The share of all 2^n choices of signs whose sum is as far from 0 as the one that was seen.

    If neither is ahead, every sign could as well be the other.
    """
    if len(units) > _MOST_FLIPS:
        return None
    seen = abs(sum(units)) * (1 - 1e-9)  # sums in another order differ in their last bits
    flips = product((1, -1), repeat=len(units))
    far = sum(abs(sum(s * u for s, u in zip(signs, units, strict=True))) >= seen for signs in flips)
    return far / float(2 ** len(units))


@dataclass(frozen=True)
class Point:
    """A row's size and quality."""

    label: str
    params: float  # #Params, the paper's convention
    overhead: float  # bits that a domain adds, over the base's weights
    value: float  # the score, or the mean accuracy in percent
    on_frontier: bool = False
    still: bool = False  # its masks did not move, on some domain at least
    is_reference: bool = False  # scores are measured against it, so its own says nothing


@dataclass(frozen=True)
class Frontier:
    """The rows that are complete, smallest first, and what they are compared by.

    On it are those for which nobody else is as small and as good. Rows whose masks did not move are left out: their
    quality is not that of what they store. So is the row that scores are measured against.
    """

    measure: Literal["score", "mean accuracy"]
    points: tuple[Point, ...]

    @property
    def members(self) -> tuple[Point, ...]:
        """Those on the frontier, from the smallest to the best."""
        return tuple(point for point in self.points if point.on_frontier)

    @property
    def left_out(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.still)


def find_frontier(table: ResultTable) -> Frontier:
    """Compare rows by their scores; where nothing is scored, by mean accuracy."""
    scored = any(row.score is not None for row in table.rows)
    points = []
    for row in table.rows:
        value = row.whole_score if scored else row.mean
        overhead = row.overhead(len(table.plan.domains))
        if value is not None and row.params is not None and overhead is not None:
            measured_by = scored and not table.reference.official and row.method.partition(":")[0] == "finetune"
            points.append(Point(row.label, row.params, overhead, value, False, bool(row.still), measured_by))
    points.sort(key=lambda point: (point.params, -point.value))
    compared = [point for point in points if not point.still and not point.is_reference]
    placed = tuple(replace(p, on_frontier=p in compared and not _is_beaten(p, compared)) for p in points)
    return Frontier("score" if scored else "mean accuracy", placed)


def _is_beaten(point: Point, others: Sequence[Point]) -> bool:
    """Whether another is no larger and no worse, and better in one of the two."""
    return any(
        other.params <= point.params
        and other.value >= point.value
        and (other.params, other.value) != (point.params, point.value)
        for other in others
    )
