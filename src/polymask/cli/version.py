"""`polymask --version`: what is installed here, for a bug report. No torch unless --verbose.

The report names versions, hardware and settings, but never a path, a user or a host.
"""

import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polymask import __version__

CORE = ("torch", "numpy", "safetensors")
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "POLYMASK_KERNELS")
_FEATURES = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
_ARM_FEATURES = ("asimd", "sve", "bf16", "i8mm")


def installation() -> dict[str, Any]:
    """Versions, machine and settings, without importing torch."""
    return {
        "polymask": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": processor(),
        "torch_build": torch_build(),
        "compiler": compiler(),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "packages": installed(CORE),
        "extras": {extra: installed(names) for extra, names in optional_packages().items()},
    }


def torch_report() -> dict[str, Any]:
    """What torch says of itself: this imports it."""
    import torch

    devices = [f"cpu ({torch.backends.cpu.get_cpu_capability()})"]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} ({about.name}, {about.total_memory >> 20} MiB)")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "devices": devices,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def optional_packages() -> dict[str, list[str]]:
    """The packages of every extra, as the installed polymask declares them."""
    declared: list[str] = []
    with suppress(PackageNotFoundError):  # run from its sources
        declared = requires("polymask") or []
    found: dict[str, list[str]] = {}
    for line in declared:
        match = re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]", line)
        if match and match[1] != "polymask" and match[2] not in ("dev", "docs"):  # for those who work on polymask
            found.setdefault(match[2], []).append(match[1])
    return found


def installed(names: Iterable[str]) -> dict[str, str | None]:
    """The versions of packages; None where one is not installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in found:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def processor() -> dict[str, Any]:
    """The processor's name, its threads, and the instructions that speed depends on."""
    details: dict[str, str] = {}
    with suppress(OSError):  # Linux describes each processor in a paragraph
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        details = {name.strip(): value.strip() for name, _, value in pairs}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = set((details.get("flags") or details.get("Features") or "").split())
    return {
        "name": details.get("model name") or platform.processor() or platform.machine(),
        "threads": os.cpu_count(),
        "usable_threads": usable,
        "features": [f for f in (*_FEATURES, *_ARM_FEATURES) if f in flags],
    }


def torch_build() -> str | None:
    """What torch was built for, read from its own version file: cpu, cuda, rocm or xpu."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        values = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    except (OSError, SyntaxError, ImportError):
        return None
    kinds = [f"{kind} {values[kind]}" for kind in ("cuda", "hip", "xpu") if values.get(kind)]
    commit = str(values.get("git_version") or "")[:12]
    return ", ".join([*(kinds or ["cpu"]), *([f"commit {commit}"] if commit else [])])


def compiler() -> str | None:
    """The C++ compiler that torch.compile would find: its name and version."""
    usual = ("cl",) if sys.platform == "win32" else ("g++", "clang++")
    names = filter(None, (os.environ.get("CXX"), *usual))
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        return None
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return Path(found).name
    number = re.search(r"\d+\.\d+(\.\d+)?", said.stdout or said.stderr)
    return f"{Path(found).name} {number[0]}" if number else Path(found).name


def print_version(arguments: list[str]) -> int:
    """Print the report that `arguments` ask for; returns the exit code."""
    if set(arguments) - {"--version", "--verbose", "--json"}:
        message = "polymask: --version takes --verbose (what torch says too) and --json, nothing else"
        print(message, file=sys.stderr)
        return 2
    found = installation()
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
