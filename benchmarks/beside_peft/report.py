"""The measurements as the tables of docs/comparison.md; needs neither torch nor PEFT."""

import re
from collections.abc import Callable
from typing import Any

WIDEST = "letters"


def sections(results: dict[str, Any]) -> dict[str, str]:
    """The parts of the page that come from a result file, by name."""
    return {
        "versions": versions(results["versions"]),
        "sequence": sequence(results["systems"]),
        "heads": heads(results["class_counts_in_peft"]),
        "step time": step_time(results["step_time"]["settings"], list(results["systems"])),
        "sizes": sizes(results["sizes"]),
        "grouped convolutions": grouped(results["grouped_convolutions"]),
    }


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with the text between its markers generated from the results."""
    for name, text in sections(results).items():
        begin, end = f"<!-- compare_peft.py: {name} -->\n", f"<!-- end of {name} -->\n"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise SystemExit(f"the page needs the lines {begin!r} and {end!r}, once each")
        between = re.escape(begin) + ".*?" + re.escape(end)
        new = f"{begin}\n{text}\n\n{end}"
        page = re.sub(between, lambda _, new=new: new, page, flags=re.DOTALL)
    return page


def versions(found: dict[str, str]) -> str:
    return "Versions: " + ", ".join(f"{name} {number}" for name, number in found.items()) + "."


def sequence(systems: dict[str, Any]) -> str:
    rows = [[title, *(cell(row) for row in systems.values())] for title, cell in ROWS.items()]
    return markdown(["", *systems], rows)


def heads(ways: dict[str, Any]) -> str:
    rows = [[way, outcome(found)] for way, found in ways.items()]
    return markdown(["different class counts in PEFT", "result"], rows)


def step_time(settings: list[dict[str, Any]], systems: list[str]) -> str:
    timed = ["fine-tuning again", *systems]
    rows = [
        [f"{row['side']} px, batch {row['batch']}", *(ratio(row["ratios"][name]) for name in timed)] for row in settings
    ]
    return markdown(["step", *timed], rows)


def sizes(networks: list[dict[str, Any]]) -> str:
    ranks = [f"LoRA rank {rank}" for rank in networks[0]["lora"]]
    rows = []
    for row in networks:
        counted = [
            row["copy"],
            row["affine-full"],
            row["affine-full, norms"],
            *row["lora"].values(),
        ]
        rows.append([f"`{row['base']}`", *map(megabytes, counted)])
    return markdown(["network", "full copy", "`affine-full`", "of it norms", *ranks], rows)


def grouped(found: dict[str, Any]) -> str:
    return (
        f"Of {found['convolutions']} convolutions of `{found['base']}`, LoRA of rank "
        f"{found['rank']} takes {found['PEFT LoRA']}, `affine-full` "
        f"{found['polymask affine-full']}."
    )


def accuracies(row: dict[str, Any]) -> str:
    before, after = row["first_domain_accuracy_before_after_percent"]
    return f"{before:.0f} %, {after:.0f} %"


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "first domain's outputs, largest": lambda r: number(r["first_domain_largest_output"]),
    "… difference after two more domains": lambda r: number(r["first_domain_difference_after_two_more"]),
    "… predictions changed": lambda r: f"{r['first_domain_predictions_changed_percent']:.1f} %",
    "… test accuracy, before and after": accuracies,
    "… difference after save and load": lambda r: number(r["difference_after_save_and_load"]),
    "base's outputs, largest": lambda r: number(r["base_largest_output"]),
    "… difference after three domains": lambda r: number(r["base_difference"]),
    "batch of several domains": lambda r: outcome(r["mixed_batch"]),
    "heads for 10, 26 and 2 classes": lambda r: ", ".join(map(str, r["head_widths"].values())),
    "file, 26 classes": lambda r: megabytes(r["file_bytes"][WIDEST]),
}


def outcome(found: dict[str, Any]) -> str:
    if not found["works"]:
        return f"raises `{found['raises']}`"
    if "widths" in found:
        return "works: " + " and ".join(map(str, found["widths"]))
    return f"works, to {number(found['difference'])}" if "difference" in found else "works"


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"


def megabytes(value: int) -> str:
    return f"{value / 1e6:.2f} MB"


def ratio(row: dict[str, Any]) -> str:
    low, high = row["quartiles"]
    return f"{row['median_ratio']:.2f} ({low:.2f}–{high:.2f})"


def markdown(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
