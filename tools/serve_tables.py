"""Write the measured parts of docs/serve.md from results/serve-load.json, auto-domain.json and under-attack.json.

python tools/serve_tables.py [--check]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "serve.md"


def main() -> int:
    """Write the parts, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = fresh = PAGE.read_text()
    for name, write in PARTS.items():
        found = ROOT / "results" / f"{name}.json"
        begin, end = f"<!-- {name}: tools/serve_tables.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = fresh.partition(begin)
        _, _, after = rest.partition(end)
        body = write(json.loads(found.read_text())) if found.exists() else ""
        fresh = before + begin + body + end + after
    if check:
        if fresh != text:
            print("docs/serve.md is stale; run python tools/serve_tables.py", file=sys.stderr)
        return 0 if fresh == text else 1
    PAGE.write_text(fresh)
    return 0


def load(found: dict[str, Any]) -> str:
    """What the server does under load, beside its yardsticks and goals."""
    single, many, hot = found["single_warm_domain"], found["many_domains"], found["hot_domain"]
    share = many["images_per_second"] / single["images_per_second"]
    growth = many["resident_mb_per_minute_at_the_end"]
    by_clients = [hot[f"beside_{what}"] for what in ("warm", "cold")]
    by_one = found.get("by_one")  # not in results from before it was measured
    rows = [
        (
            f"one warm domain, {single['batch']} images a request",
            f"{single['images_per_second']:.1f} images a second through HTTP, "
            f"{single['bare_images_per_second']:.1f} by the bare network: "
            f"{single['share_of_bare']:.2f} of it",
            "",
        ),
        *(_by_one(by_one, single["images_per_second"]) if by_one else ()),
        (
            f"{many['domains']:,} domains by Zipf(1.0), {many['cache_networks']} kept warm, one image a request",
            f"{many['images_per_second']:.1f} images a second, {share:.2f} of one warm domain",
            _goal("at least 0.65", share >= 0.65),
        ),
        (
            "its times",
            f"p50 {many['p50_ms']:.0f} ms, p99 {many['p99_ms']:.0f} ms",
            _goal("p99 at most 3 × p50", many["p99_ms"] <= 3 * many["p50_ms"]),
        ),
        ("its cache", f"{100 * many['hit_rate']:.0f} % hits, {many['merges']:,.0f} merges", ""),
        (
            f"its memory over {many['seconds']:.0f} seconds",
            f"{many['resident_mb_first_half']:,.0f} MB on average in the first half, "
            f"{many['resident_mb_second_half']:,.0f} in the second, {growth:+.1f} MB a minute there",
            _goal("at most 2 MB a minute", growth <= 2),
        ),
        (
            f"one client of a hot domain, beside {hot['others']} of warm domains, and beside {hot['others']} that ask "
            "for a cold one every time",
            " and ".join(f"p50 {one['p50_ms']:.0f} ms, p99 {one['p99_ms']:.0f} ms" for one in by_clients),
            "",
        ),
    ]
    for kept, one in found["full_checkpoints"].items():
        what = "read for each image" if kept == "0" else f"the last {kept} kept in memory"
        rows.append(
            (
                f"the same draws by full checkpoints, {what}",
                f"{one['images_per_second']:.1f} images a second: the server does {one['factor']:.2f} times as many",
                "" if kept == "0" else _goal("at least 1.5 times", one["factor"] >= 1.5),
            )
        )
    rows.append(
        (
            "a domain on disk",
            f"{found['pack_bytes'] / 1e6:.2f} MB; a full checkpoint "
            f"{found['checkpoint_bytes'] / 1e6:.1f} MB, "
            f"{found['checkpoint_bytes'] / found['pack_bytes']:.0f} times as much",
            "",
        )
    )
    about = (
        f"{found['base']}, {found['cores']} cores, torch {found['torch']}; "
        f"{found['single_warm_domain']['clients']} clients on the same machine for one warm domain, "
        f"{many['clients']} for many; a merged network takes "
        f"{found['merged_bytes'] / 1e6:.1f} MB.\n\n"
    )
    return about + _table(("", "found", "goal"), rows)


def _by_one(found: dict[str, Any], batched: float) -> list[tuple[str, str, str]]:
    """Warm domains that are asked for one image at a time, beside one that is asked for many."""
    titles = {"one": "one warm domain", "kept": f"{found['domains']} warm domains by Zipf(1.0)"}
    return [
        (
            f"{title}, one image a request",
            f"{found[name]:.1f} images a second, {found[name] / batched:.2f} of one warm domain",
            "",
        )
        for name, title in titles.items()
    ]


def _goal(text: str, met: bool) -> str:
    return f"{text}: {'met' if met else 'missed'}"


def auto(found: dict[str, Any]) -> str:
    """How often each rule finds the domain of a test image."""
    rules = sorted(found["rules"].items(), key=lambda item: -item[1]["right"])
    rows = [(rule, f"{100 * one['right']:.1f} %") for rule, one in rules]
    everywhere, names = found["likeness_on_all"], list(found["accuracy"])
    others = [name for name in everywhere["by_domain"] if name not in names]
    lowest = sorted(everywhere["by_domain"].items(), key=lambda item: item[1])[:2]
    about = (
        f"{found['images_of_each_domain']} test images of each of {len(names)} domains "
        f"({', '.join(names)}) on {found['base']}. With {len(others)} more "
        f"({', '.join(others)}) the likeness finds {100 * everywhere['right']:.1f} %; "
        "its lowest are " + " and ".join(f"{name} with {100 * share:.0f} %" for name, share in lowest)
    )
    return _table(("the domain with the largest …", "is the right one for"), rows) + f"\n{about}.\n"


def attacks(found: dict[str, Any]) -> str:
    """What an honest client waits for while others attack, and what an attack takes."""
    rows = [
        (what, f"{one['p50_ms']:.0f}", f"{one['max_ms']:.0f}", f"{one['more_mb_each']:.0f}")
        for what, one in found["attacks"].items()
    ]
    heads = ("attack", "honest answer, median, ms", "the slowest, ms", "memory of an attacking connection, MB")
    about = f"{found['connections']} attacking connections for {found['seconds']:.0f} s each, {found['cores']} cores."
    return f"{about}\n\n{_table(heads, rows)}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


PARTS = {"serve-load": load, "auto-domain": auto, "under-attack": attacks}


if __name__ == "__main__":
    sys.exit(main())
