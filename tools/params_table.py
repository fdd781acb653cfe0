"""Write docs/params.md: #Params of every system in the paper's tables, printed and counted.

python tools/params_table.py [--check]
"""

import argparse
import sys
from functools import cache
from pathlib import Path

import polymask as pm
from polymask.benchmarks.published import PublishedRow, PublishedTable, published_tables

PAGE = Path(__file__).parents[1] / "docs" / "params.md"
HEADS = {  # classes of all domains but the base's own
    "imagenet-to-sketch": 200 + 196 + 102 + 195 + 250,
    "decathlon": 100 + 100 + 2 + 47 + 43 + 1623 + 10 + 101 + 102,
}
NETWORKS = {  # of other papers' rows in the decathlon's table
    "decathlon-resnet26": (
        "ra",
        "ra_decay",
        "ra_n",
        "ra_joint",
        "pa",
        "pa_svd",
        "spottune",
        "covnorm",
    ),
}
PACKNET = (
    "printed as a ratio of rounded file sizes (103 / 94 MB on ResNet-50); an owner index of 3 bits "
    "a weight gives what is counted here"
)
SERIES = "rounded to a whole number"
NOTES = {
    "packnet_down": PACKNET,
    "packnet_up": PACKNET,
    "ba2": (
        "5 numbers of 32 bits a channel, four of a batch norm and a switch, give the printed 1.03 "
        "on ResNet-50 and the Wide ResNet; here a switch is a bit. Nothing that we tried gives "
        "DenseNet's 1.17"
    ),
    "ra": SERIES,
    "ra_decay": SERIES,
    "ra_n": SERIES,
    "ra_joint": SERIES,
    "pa": SERIES,
    "pa_svd": "the rank is not published; half of it is assumed here",
    "dan": "controllers of 3x3 layers; 2.19 with `always=True`: the printed number is between",
    "mtan": "1.75 with the ten heads, on its own network; the attention here fits this one",
    "spottune": "10 without the policies, which take a fifth of a network each",
    "covnorm": "counted before its ranks are found, which depend on the data",
}
INTRODUCTION = """
The paper's #Params is 1 + A (T - 1) / (32 N): T domains with the base's own, N parameters of the base
without its classifier, A bits for one more domain. `polymask account` counts it in the paper's convention (two
numbers for a batch norm's channel) and as stored (four). The tables of the literature mix conventions; this
page says which one gives which printed number. "With heads" adds the classifiers of all domains to what is
stored, 32 bits a weight; the paper leaves them out.
"""


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = written()
    if parser.parse_args().check:
        fresh = PAGE.exists() and PAGE.read_text() == text
        if not fresh:
            print("docs/params.md is stale; run python tools/params_table.py", file=sys.stderr)
        return 0 if fresh else 1
    PAGE.write_text(text)
    return 0


def written() -> str:
    """The page."""
    parts = [
        "# #Params, printed and counted",
        INTRODUCTION.strip(),
    ]
    for table in published_tables().values():
        domains = 6 if table.benchmark == "imagenet-to-sketch" else 10
        parts.append(f"## {table.name}: {domains} domains")
        heads = (
            "system",
            "method",
            "network",
            "printed",
            "paper's convention",
            "as stored",
            "with heads",
            "agrees to the digits printed",
            "why not, or how",
        )
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for row in table.rows.values():
            lines.append(line(table, row, domains))
        parts.append("\n".join(lines))
    parts.append("Made by `python tools/params_table.py`.")
    return "\n\n".join(parts) + "\n"


@cache
def network_of(name: str) -> pm.Base:
    """The structure of a network, without its weights."""
    return pm.load_base(name, pretrained=False, device="meta")


def line(table: PublishedTable, row: PublishedRow, domains: int) -> str:
    """One system."""
    if row.method is None:
        return f"| {row.label} | – | – | {row.params:g} | – | – | – | – | not a method of polymask |"
    network = next((n for n, systems in NETWORKS.items() if row.system in systems), table.base)
    base = network_of(network)
    found = pm.account(base, row.method, domains=domains)
    heads = base.feature_dim * HEADS[table.benchmark] / found.base_parameters
    printed = f"{row.params:g}"
    digits = len(printed.partition(".")[2])
    counted = {
        "paper's": found.params_paper,
        "stored": found.params_stored,
        "with heads": found.params_stored + heads,
    }
    agrees = [name for name, value in counted.items() if round(value, digits) == row.params]
    cells = [
        row.label,
        f"`{row.method}`",
        network.removeprefix("torchvision:"),
        printed,
        *(f"{value:.3f}" for value in counted.values()),
        ", ".join(agrees) or "none",
        "" if "paper's" in agrees and row.system not in NOTES else NOTES.get(row.system, ""),
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
