"""The picture of accuracy against bits: what each method of two benchmarks adds for a domain, and what it reaches.

    python benchmarks/bits_figure.py results/sketch-mini-64 results/decathlon-mini-32 --out docs/assets/bits.svg

Sizes are those of a benchmark's #Params: masks, scalars, norms and adapters beside the base's weights, without heads,
in bits for each of the base's weights. Methods of one family that differ in their size are joined.
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polymask.benchmarks.records import read_runs
from polymask.benchmarks.tables import ResultTable, tabulate

FAMILIES = {"affine-coarse": ("masks", "C0"), "affine-centred": ("masks", "C0"), "lora-conv": ("LoRA", "C1")}
OTHERS = ("classifier-only", "bn-only", "parallel-adapter", "series-adapter", "bitdelta", "piggyback-bn", "finetune")
LEAST = 0.008  # where what adds nothing stands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figure = Figure(figsize=(5.2 * len(options.runs), 4), layout="constrained")
    for axes, folder in zip(figure.subplots(1, len(options.runs), squeeze=False)[0], options.runs, strict=True):
        draw(axes, tabulate(read_runs(folder)))
        axes.set_title(folder.name, fontsize=10)
    figure.savefig(options.out, metadata={"Date": None})


def draw(axes: Axes, table: ResultTable) -> None:
    """A point for each row that is whole, with its name; families are joined."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in table.rows:
        name, bits = row.method.partition(":")[0], row.overhead(len(table.plan.domains))
        if row.mean is None or bits is None or row.direction or name not in (*FAMILIES, *OTHERS):
            continue
        x, family = max(bits, LEAST), FAMILIES.get(name)
        axes.scatter(x, row.mean, color=family[1] if family else "0.4", marker="o" if family else "s", zorder=2)
        text = row.method.partition(":")[2] or name
        place: dict[str, Any] = {"xytext": (5, 4)} if family else {"xytext": (-5, -9), "ha": "right"}
        axes.annotate(text, (x, row.mean), textcoords="offset points", fontsize=7, **place)
        if family:
            lines.setdefault(family, []).append((x, row.mean))
    for (title, colour), points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), color=colour, linewidth=1, zorder=1, label=title)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_xscale("log")
    axes.set_xlim(LEAST / 8, 100)
    ticks = [LEAST, 0.03, 0.1, 0.3, 1, 3, 10, 30]
    axes.set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
    axes.minorticks_off()
    axes.set_xlabel("bits a weight that a domain adds, without its head (logarithmic)")
    axes.set_ylabel("mean test accuracy, %")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
