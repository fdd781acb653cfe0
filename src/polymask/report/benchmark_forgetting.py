"""Tables of what methods forget."""

from polymask.benchmarks.forgotten import Forgotten
from polymask.benchmarks.records import Plan
from polymask.benchmarks.tables import Statistic
from polymask.report.benchmark_results import HERE, number, over_seeds
from polymask.report.sheet import Column, Line, Sheet
from polymask.report.wording import listed


def forgetting_sheet(forgotten: Forgotten, plan: Plan) -> Sheet | None:
    """Points that each domain lost between the end of its own training and the end of all."""
    if not forgotten.losses:
        return None
    lines = []
    for loss in forgotten.losses:
        cells = [over_seeds(_signed(one), 1, len(plan.seeds)) for one in loss.lost.values()]
        cells.append(number(None if loss.mean is None else loss.mean + 0.0, 1))
        lines.append(Line(loss.label, tuple(cells)))
    group = "points of test accuracy lost"
    columns = (*(Column(domain, group) for domain in plan.domains), Column("mean", group))
    return Sheet(
        "forgetting-domains",
        "Domains, after the later ones were learned",
        HERE,
        "method",
        columns,
        tuple(lines),
        ("Accuracy right after a domain's own training, less that at the end; below 0 it gained.",),
    )


def base_sheet(forgotten: Forgotten) -> Sheet | None:
    """What became of the base, for methods that move it."""
    found = [loss for loss in forgotten.losses if loss.base is not None]
    if not found:
        return None
    lines = []
    for loss in found:
        assert loss.base is not None
        change = loss.base.change
        percent = None if change is None else Statistic(100 * change.mean, None, change.n)
        cells = [over_seeds(percent, 1, None)]
        cells += [
            over_seeds(one, 1, planned)
            for one, planned in (
                (loss.base.agreement, 1),
                (loss.base.before, None),  # one measurement, whatever the seed
                (loss.base.after, 1),
            )
        ]
        lines.append(Line(loss.label, tuple(cells)))
    columns = (
        Column("weights changed by, %"),
        Column("same class as before, %"),
        Column("own domain before, %"),
        Column("own domain after, %"),
    )
    note = (
        "Weights: |W' − W| / |W| over those that were moved. Same class: the share of the domains' "
        "images that the base's own classifier still puts in the same class. Own domain: that "
        "classifier's accuracy."
    )
    return Sheet("forgetting-base", "The base", HERE, "method", columns, tuple(lines), (note,))


def safe_text(forgotten: Forgotten) -> str:
    """Who cannot forget, in a sentence."""
    if not forgotten.safe:
        return ""
    verb = "learns" if len(forgotten.safe) == 1 else "learn"
    return (
        f"{listed(forgotten.safe)} {verb} every domain by itself on a base that does not change: "
        "nothing is forgotten, by construction, and there is nothing to measure."
    )


def _signed(one: Statistic | None) -> Statistic | None:
    """The same without a minus before zero."""
    if one is None or round(one.mean, 1) != 0:
        return one
    return Statistic(0.0, one.sd, one.n)
