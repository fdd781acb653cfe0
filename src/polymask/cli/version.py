"""`polymask --version`: what is installed here, for a bug report. No torch unless --verbose."""

import json
import sys
from typing import Any

from polymask.cli.environment import report, torch_report

FLAG = "--version"
USAGE = f"polymask: {FLAG} takes --verbose (what torch says too) and --json, nothing else"


def print_version(arguments: list[str]) -> int:
    """Print the report that `arguments` ask for; what is returned is the exit code."""
    if set(arguments) - {FLAG, "--verbose", "--json"}:
        print(USAGE, file=sys.stderr)
        return 2
    found = report()
    if "--verbose" in arguments:
        found["torch"] = torch_report()
    print(json.dumps(found, indent=1) if "--json" in arguments else as_text(found))
    return 0


def as_text(found: dict[str, Any]) -> str:
    """The report as lines; the first is the version alone."""
    cpu, settings = found["processor"], found["settings"]
    lines = {
        "python": found["python"],
        "system": found["system"],
        "processor": f"{cpu['name']}, {cpu['usable_threads']} of {cpu['threads']} threads",
        "features": " ".join(cpu["features"]) or "unknown",
        "packages": _versions(found["packages"]),
        "torch build": found["torch_build"] or "not installed",
        "compiler": found["compiler"] or "none found",
        "settings": ", ".join(f"{name}={value}" for name, value in settings.items()) or "none",
    }
    lines |= {f"[{extra}]": _versions(names) for extra, names in found["extras"].items()}
    if "torch" in found:
        lines |= {name.replace("_", " "): _plain(value) for name, value in found["torch"].items()}
    width = max(map(len, lines))
    rows = [f"{name:{width}}  {value}" for name, value in lines.items()]
    return "\n".join([f"polymask {found['polymask']}", *rows])


def _versions(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {number or '–'}" for name, number in packages.items())


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)
