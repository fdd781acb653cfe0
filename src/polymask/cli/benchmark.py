"""The verb that runs a benchmark: methods, domains and seeds, each a job that can be cut."""

import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from polymask.cli.verb import BaseVerb, check_seed, given_fields, number_text, recipe_overrides, table
from polymask.errors import BenchmarkError
from polymask.files import locked
from polymask.train.recipe import get_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.benchmarks.jobs import Job
    from polymask.benchmarks.planning import Request
    from polymask.benchmarks.records import Outcome, Plan

# Every method is measured as it learned, and every domain has the same epochs.
_OTHERWISE = ("test_side", "frozen_side", "refit_on_val", "least_steps")
Changes: Any = recipe_overrides("Changes", without=("name", "selection", "train_on_val", *_OTHERWISE))


@dataclass(kw_only=True)
class BenchmarkVerb(BaseVerb):
    """Run methods on a benchmark's domains; run again, it goes on where it was cut."""

    benchmark: tyro.conf.Positional[str]
    """imagenet-to-sketch, decathlon, demo, or a folder with a folder for each domain."""
    methods: str
    """Names, separated by commas; after colons, options of the method and fields of the recipe for
    this row: affine-full,ba2:norms=own,lora:rate=3e-3,dan:recipe=residual-adapters."""
    base: str = "efficientnet-lite0"
    """A built-in base, timm:NAME, torchvision:NAME, or a base's file."""
    data: Path | None = None
    """The folder of the benchmark's images."""
    seeds: str = "0"
    """Numbers, separated by commas."""
    out: Path = Path("runs")
    """Where the runs go: one folder holds runs of one plan."""
    recipe: str | None = None
    """In place of the paper's for this benchmark (quick, for demo and folders)."""
    selection: Literal["last", "val", "test"] = "last"
    """Which epoch counts: the last, after training on train and val; the best on val; or the best
    on test, which flatters."""
    crops: Literal["1", "5", "10", "submission"] = "1"
    """Pieces of a test image whose logits are averaged; submission: 10 where a domain may be
    mirrored, 5 elsewhere."""
    orders: str = "down,up"
    """For methods where the order of domains counts: down, up, or both."""
    limit: int | None = None
    """The most training images to use of a domain."""
    classes: str | None = None
    """Keep only the first classes: 50 of every domain, or cubs=50,flowers=20."""
    domains: str | None = None
    """Only these domains, separated by commas."""
    labels: Path | None = None
    """The decathlon's labels_test.zip, where the annotations of test are stripped."""
    tune: tuple[str, ...] = ()
    """Search on val before the runs, for each method: rate=1e-4,3e-4,1e-3 (a field of the recipe or
    an option), lora:rate=1e-3,3e-3 for one method. A rate is that of whole weights too."""
    tune_on: str | None = None
    """The domains whose val decides, separated by commas; by default all."""
    submission: bool = False
    """Write the decathlon's results.json for every method and seed."""
    engine: Literal["local", "ray"] = "local"
    """Where jobs run: on this machine, or on a Ray cluster."""
    workers: int = 1
    """local: processes that work at the same time."""
    threads: int | None = None
    """Threads of each process."""
    address: str | None = None
    """ray: auto, or HOST:PORT of the head node; one of its own on this machine unless given."""
    cpus_per_job: float = 1
    """ray: what a job takes of a node."""
    gpus_per_job: float = 0
    """ray: what a job takes of a node; a fraction lets several jobs share a GPU."""
    shared: str | None = None
    """ray: a URL that all nodes reach (s3://BUCKET/runs), where they share no file system."""
    cache: Path | None = None
    """A folder that keeps decoded images for the next run."""
    changes: Changes = field(default_factory=Changes)

    def needs(self) -> list[str]:
        return ["PIL"] + (["ray"] if self.engine == "ray" else [])

    def run(self) -> dict[str, Any]:
        from polymask.benchmarks.records import PLAN

        request = self.request()
        with locked(self.out / PLAN):  # two at once would lose each other's rows
            return self._run(request)

    def _run(self, request: "Request") -> dict[str, Any]:
        from polymask.benchmarks.findings import summarise
        from polymask.benchmarks.jobs import write_submissions
        from polymask.benchmarks.planning import conclude, final_jobs, make_plan, search_jobs
        from polymask.benchmarks.tables import settings_text
        from polymask.core.network import choose_device

        plan = make_plan(request)
        if self.engine == "local":  # nodes of a cluster choose their own
            self.say_device(choose_device(self.device))
        self.say(
            f"{plan.benchmark} on {plan.base}: {len(plan.domains)} domains, "
            f"{len(request.methods)} methods, seeds {self.seeds}; in {self.out}"
        )
        for deviation in plan.deviations:
            self.say(f"not as in the paper: {deviation}", style="dim")
        trials = search_jobs(request, plan)
        if trials:
            self.say(f"search on val of {', '.join(request.search_domains)}: {len(trials)} jobs")
        plan = conclude(request, plan, self._run_jobs(plan, trials))
        for text in request.methods:
            if text in plan.tuning:
                tuned = plan.tuning[text]
                found = "; ".join(filter(None, (settings_text(tuned.chosen), tuned.remark)))
                self.say(f"{text}: {found}", style="dim")
        jobs = final_jobs(request, plan)
        result = summarise(plan, self._run_jobs(plan, jobs))
        if self.submission:
            result["submissions"] = [str(path) for path in write_submissions(jobs)]
        return result

    def _run_jobs(self, plan: "Plan", jobs: "list[Job]") -> "list[Outcome]":
        """Run jobs while a table shows how they go."""
        from polymask.benchmarks.local import run_jobs
        from polymask.cli.progress import LiveTable

        if not jobs:
            return []
        with LiveTable(plan, jobs) as watcher:
            return run_jobs(
                jobs,
                engine=self.engine,
                workers=self.workers,
                threads=self.threads,
                watcher=watcher,
                address=self.address,
                cpus_per_job=self.cpus_per_job,
                gpus_per_job=self.gpus_per_job,
                shared=self.shared,
            )

    def request(self) -> "Request":
        """What the options ask for."""
        from polymask.benchmarks.jobs import BaseName
        from polymask.benchmarks.local import threads_of_a_job
        from polymask.benchmarks.planning import Request
        from polymask.benchmarks.search import read_ladder
        from polymask.benchmarks.suites import Protocol, find_suite

        suite = find_suite(self.benchmark, self.data)
        if self.domains is not None:
            suite = suite.only(_listed("domains", self.domains))
        if self.submission and suite.name != "decathlon":
            raise BenchmarkError(f"{suite.name} has no submissions; leave out --submission")
        directions = _listed("orders", self.orders)
        if not set(directions) <= {"down", "up"}:
            raise BenchmarkError(f"--orders {self.orders}: give down, up, or both")
        recipe = get_recipe(self.recipe or suite.recipe, **given_fields(self.changes))
        nothing: dict[str, Any] = dict.fromkeys(_OTHERWISE)
        recipe = replace(recipe, **nothing)
        return Request(
            suite=suite,
            base=BaseName(self.base, self.weights, self.device),
            methods=_listed("methods", self.methods),
            seeds=_seeds(self.seeds),
            protocol=Protocol(recipe, self.selection, self.crops, self.limit, _counts(self.classes), self.labels),
            out=self.out,
            directions=directions,
            cache=self.cache,
            ladders=tuple(read_ladder(text) for text in self.tune),
            search_on=() if self.tune_on is None else _listed("tune-on", self.tune_on),
            command=shlex.join(["polymask", *sys.argv[1:]]),
            threads=threads_of_a_job(self.engine, self.workers, self.threads, self.cpus_per_job),
            workers="ray" if self.engine == "ray" else str(self.workers),
        )

    def present(self, result: dict[str, Any], console: "Console") -> None:
        domains = list(result["domains"])
        rows = []
        for row in result["rows"]:
            cells = [number_text(row["accuracy"][name], row["deviation"][name]) for name in domains]
            rows.append([row["label"], f"{row['params']:.2f}", *cells])
        console.print(table("test accuracy, %", "#Params", *domains, rows=rows))
        for row in result["rows"]:
            if row["remark"]:
                console.print(f"{row['label']}: {row['remark']}")
        for file in result.get("submissions", []):
            console.print(f"wrote {file}")
        console.print(f"tables, figures and scores: polymask report {self.out}", style="dim")


def _listed(what: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise BenchmarkError(f"--{what} is empty; give names, separated by commas")
    return names


def _seeds(text: str) -> tuple[int, ...]:
    found = _listed("seeds", text)
    for part in found:
        if not (part.isascii() and part.isdigit()):
            raise BenchmarkError(f"--seeds has {part!r}; give numbers from 0, separated by commas")
        check_seed(int(part))
    return tuple(map(int, found))


def _counts(text: str | None) -> tuple[tuple[str, int], ...]:
    """Domain and count of every part of "50" or "cubs=50,flowers=20"."""
    found = []
    for part in () if text is None else _listed("classes", text):
        domain, _, count = part.rpartition("=")
        if not (count.isascii() and count.isdigit()):
            raise BenchmarkError(f"--classes has {part!r}; give 50, or cubs=50,flowers=20")
        found.append((domain, int(count)))
    return tuple(found)
