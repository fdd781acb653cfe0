"""The measurements as tables next to the goals, and as a figure."""

from collections.abc import Iterator
from typing import Any

from cost.timing import markdown, spread

from polymask.report.canvas import open_canvas, write
from polymask.report.page_parts import MUTED, SERIES

Row = tuple[str, str, str, bool | None]  # what, goal, found, whether the goal is met

OURS = ("eager", "compiled", "masks", "weights", "complete", "cold")


def tables(results: dict[str, Any], others: dict[str, Any]) -> str:
    """The goals and whether they are met, then every ratio."""
    rows = [["", "goal", "found", ""]]
    for what, goal, found, met in goals(results, others):
        rows.append([what, goal, found, {True: "met", False: "not met", None: ""}[met]])
    parts = [markdown(rows), measured_on(results["setup"])]
    for part, title in TITLES.items():
        if part in results:
            parts.append(f"{title}\n\n" + ratio_table(results[part]["ratios"]))
    if "settings" in results:
        parts += [setting_table(results["settings"])]
    return "\n\n".join(parts)


def measured_on(setup: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    threads = "one thread" if setup["threads"] == 1 else f"{setup['threads']} threads"
    return f"In {setup['clock']} of {threads}; Python {setup['python']}, {versions}."


TITLES = {
    "transform": "All masked weights of ResNet-50 and their gradients, × a copy of the weights:",
    "switch": "Switching ResNet-50 to another domain, × a copy of the weights:",
    "inference": "One image through ResNet-50, × the plain network:",
    "step": "A training step of ResNet-50, × plain fine-tuning:",
    "small step": "A training step of EfficientNet-Lite0, 32 images of 96 px, × a plain loop over timm's network:",
}


def ratio_table(found: dict[str, Any]) -> str:
    rows = [["", "ratio (quartiles)", "milliseconds"]]
    rows += [[name, spread(row), f"{1e3 * row['seconds']:.4g}"] for name, row in found.items()]
    return markdown(rows)


def setting_table(part: dict[str, Any]) -> str:
    rows = [["training step, × rows (no channels last)", "channels last", "and bfloat16"]]
    for name, found in part["ratios"].items():
        rows.append([name, spread(found["channels last"]), spread(found["bfloat16"])])
    return markdown(rows)


def goals(results: dict[str, Any], others: dict[str, Any]) -> Iterator[Row]:
    """Each goal with its result; parts that were not measured are left out."""
    if "transform" in results:
        part = results["transform"]
        found, faster = part["ratios"]["compiled"], part["times_faster_than_naive"]["compiled"]
        yield at_most("compiled transform + mask gradient, × memcpy", 5, found)
        yield (
            "compiled transform + mask gradient against naive autograd",
            "≥ 5 times faster",
            f"{faster:.1f} times",
            faster >= 5,
        )
    if "step" in results:
        yield from step_goals(results)
    if "small step" in results:
        found = results["small step"]["ratios"]
        for kind, limit in (("eager", 1.05), ("compiled", 1.0)):
            what = f"training step of EfficientNet-Lite0 at 96 px, × a plain loop over timm's, {kind}"
            yield within(what, limit, found, f"masks, {kind}", "timm again")
    if "memory" in others:
        for kind, limit in (("eager", 9), ("compiled", 9)):
            found = others["memory"]["bytes_per_weight_over_finetune"][f"masks, {kind}"]
            what = f"peak memory over fine-tuning, bytes a masked weight, {kind}"
            yield what, f"≤ {limit}", f"{found:.1f}", found <= limit
    if "switch" in results:
        found = results["switch"]["ratios"]
        yield at_most("switch, weights, × memcpy, compiled", 1.2, found["weights, compiled"])
        yield at_most("switch, weights, × memcpy, eager", 4.5, found["weights, eager"])
        found = results["switch"]["against_load_state_dict"]
        for kind, limit in (("compiled", 1.0), ("eager", 1.5)):
            what = f"complete switch, × `load_state_dict`, {kind}"
            yield at_most(what, limit, found[f"complete, {kind}"])
    for base, kinds in others.get("cold", {}).get("bases", {}).items():
        for kind, one in kinds.items():
            ratio = one["miss over hit"]
            what = f"from a pack on disk to the logits of one image, × a domain in memory, {base}, {kind}"
            yield what, "≤ 1.5", f"{ratio:.2f}", ratio <= 1.5
    if "inference" in results:
        found = results["inference"]["ratios"]
        share = 100 * found["cached switch"]["median"]
        what = "switch to a cached domain, of a forward pass with one image"
        yield what, "≤ 1 %", f"{share:.3f} %", share <= 1
        yield within("merged inference, × the plain network", 1.0, found, "merged", "plain again")
        part = results["inference"]["mixed"]
        what = f"a batch of {part['domains']} domains, × the plain network on its groups"
        yield within(what, 1.0, part["ratios"], "mixed batch", "plain again")
    if "scale" in others:
        yield from scale_goals(others["scale"])
    if "show" in results:
        part = results["show"]
        good = part["cpu_seconds"] <= 0.4 and not part["imports_torch"]
        torch_too = "torch" if part["imports_torch"] else "no torch"
        found = f"{part['cpu_seconds']:.2f} s, {torch_too}"
        yield "`polymask show PACK`", "≤ 0.4 s CPU, no torch", found, good
    if "demo" in others:
        minutes = others["demo"]["seconds"] / 60
        yield "`polymask demo`", "≤ 6 minutes", f"{minutes:.1f} minutes", minutes <= 6
    for source, row in others.get("data", {}).get("sources", {}).items():
        what = f"share of training time spent waiting for images, {source}"
        yield what, "", f"{100 * row['waiting_share']:.1f} %", None


def step_goals(results: dict[str, Any]) -> Iterator[Row]:
    """Steps as timed, and as computed from their components."""
    found, limits = results["step"]["ratios"], {"compiled": 1.02, "eager": 1.06}
    for kind, limit in limits.items():
        if "transform" in results:
            more = results["transform"]["ratios"][f"{kind}, gradients by channels"]["seconds"]
            ratio = 1 + more / found["fine-tuning"]["seconds"]
            what = f"training step, × fine-tuning, from components, {kind}"
            yield what, f"≤ {limit}", f"{ratio:.3f}", ratio <= limit
        what = f"training step, × fine-tuning, timed whole, {kind}"
        yield within(what, limit, found, f"masks, {kind}", "fine-tuning again")


def scale_goals(part: dict[str, Any]) -> Iterator[Row]:
    first, last = part["sizes"][0], part["sizes"][-1]
    for verb, words in {"load": "take up a library", "call": "first call", "add": "add"}.items():
        ratio = last[f"{verb}_seconds"] / first[f"{verb}_seconds"]
        what = f"{words}, seconds a domain, {last['domains']:,} domains on disk against {first['domains']}"
        yield what, "flat", f"{ratio:.2f} times", ratio <= 1.5
    kilobytes = (last["resident_bytes"] - last["cache_bytes"]) / last["domains"] / 1e3
    pack = part["setup"]["pack_bytes"] / 1e3
    what = f"memory of a domain that is not used, of {last['domains']:,} on disk"
    yield what, "≤ 1 % of its pack", f"{kilobytes:.1f} of {pack:,.0f} kB", kilobytes <= pack / 100


def at_most(what: str, limit: float, found: dict[str, Any]) -> Row:
    return what, f"≤ {limit:g}", spread(found), found["median"] <= limit


def within(what: str, limit: float, found: dict[str, Any], name: str, again: str) -> Row:
    """Met if the ratio is no larger than the goal plus what the clock cannot resolve."""
    low, high = found[again]["quartiles"]
    noise = max(high - 1, 1 - low, 0)
    text = f"{spread(found[name])}; the same twice: {spread(found[again])}"
    goal = f"≤ {limit:g}, within the spread"
    return what, goal, text, found[name]["median"] <= limit + noise


def figure(results: dict[str, Any]) -> str:
    """Bars for learning and switching, in copies of the weights."""
    panels = [
        ("masked weights and their gradients", bars(results["transform"], "memcpy")),
        ("switching to another domain", bars(results["switch"], "memcpy")),
    ]
    height = 22
    top, gap = 30, 40
    with open_canvas(520, top + gap + height * sum(len(b) for _, b in panels)) as sheet:
        below = sheet.height - top
        for title, found in panels:
            size = height * len(found)
            axes = sheet.axes(left=150, right=48, top=sheet.height - below, bottom=below - size)
            draw(axes, title, found)
            below -= size + gap
        told = "; ".join(f"{n} {v:.1f}" for _, found in panels for n, v in found.items())
        return sheet.svg("speed", f"Time in copies of ResNet-50's weights: {told}.")


def draw(axes: Any, title: str, found: dict[str, float]) -> None:
    longest = max(found.values())
    axes.set_xlim(0, longest)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_axis_off()
    own = [name.startswith(OURS) for name in found]
    colours = [SERIES[0].light if mine else MUTED.light for mine in own]
    axes.barh(range(len(found)), list(found.values()), 0.62, color=colours)
    write(axes, 0, -0.95, f"{title}, × memcpy", color=MUTED.light)
    for row, (name, value) in enumerate(found.items()):
        write(axes, -longest / 60, row, name, ha="right", va="center_baseline")
        write(axes, value + longest / 60, row, f"{value:.1f}", va="center_baseline")


def bars(part: dict[str, Any], unit: str) -> dict[str, float]:
    """Medians, largest first, without the unit itself."""
    shown = {n: row for n, row in part["ratios"].items() if "gradients" not in n}
    found = {n: row["median"] for n, row in shown.items() if not n.startswith(unit)}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
