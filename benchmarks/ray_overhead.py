"""What Ray costs compared with local processes, for jobs of about a minute.

python benchmarks/ray_overhead.py --out results/ray-overhead.json

The same jobs run in turn with `--workers N` and with a Ray of its own, including starting and stopping
each. Overhead is computed from the median times. About ten minutes on an idle machine with two cores.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from polymask.benchmarks.jobs import BaseName
from polymask.benchmarks.local import run_jobs
from polymask.benchmarks.planning import Request, final_jobs, make_plan
from polymask.benchmarks.suites import Protocol, find_suite
from polymask.train.recipe import get_recipe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a job")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        epochs = calibrate(Path(place), given.seconds, given.workers)
        times: dict[str, list[float]] = {"local": [], "ray": []}
        spent: dict[str, list[float]] = {"local": [], "ray": []}
        for repeat in range(given.repeats):
            for engine in times if repeat % 2 == 0 else reversed(times):
                jobs = plan(Path(place) / f"{engine}-{repeat}", given.jobs, epochs)
                began = time.perf_counter()
                share = os.cpu_count() / given.workers  # so that Ray runs as many at a time
                options = {"engine": engine, "workers": given.workers, "cpus_per_job": share}
                found = run_jobs(jobs, **options, threads=1)
                times[engine].append(time.perf_counter() - began)
                spent[engine] += [outcome.seconds for outcome in found]
                print(f"{engine}: {times[engine][-1]:.1f} s", flush=True)
    medians = {engine: statistics.median(all_times) for engine, all_times in times.items()}
    content = {
        "jobs": given.jobs,
        "workers": given.workers,
        "epochs": epochs,
        "seconds of a job": {e: round(statistics.median(s), 2) for e, s in spent.items()},
        "seconds": {e: [round(t, 2) for t in all_times] for e, all_times in times.items()},
        "overhead": round(medians["ray"] / medians["local"] - 1, 4),
    }
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content))


def plan(out: Path, count: int, epochs: int) -> list:
    recipe = get_recipe("quick", side=64, epochs=epochs)
    suite = replace(find_suite("demo", None), domains={"digits": "digits"})
    seeds = tuple(range(count))
    base, protocol = BaseName("efficientnet-lite0"), Protocol(recipe, limit=300)
    request = Request(suite, base, ("affine-full",), seeds, protocol, out)
    return final_jobs(request, make_plan(request))


def calibrate(place: Path, seconds: float, workers: int) -> int:
    """The epochs of a job that takes about this long while all workers are busy."""
    took = []
    for epochs in (1, 4):
        jobs = plan(place / f"calibration-{epochs}", workers, epochs)
        found = run_jobs(jobs, workers=workers, threads=1)
        took.append(statistics.median(outcome.seconds for outcome in found))
    each = (took[1] - took[0]) / 3
    return max(1, 1 + round((seconds - took[0]) / max(each, 0.1)))


if __name__ == "__main__":
    main()
