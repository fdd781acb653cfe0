"""From what is asked of a benchmark to its jobs, with everything checked before any training."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymask import __version__
from polymask.benchmarks.jobs import BaseName, Job, eval_loader, load_domain_data
from polymask.benchmarks.records import PLAN, DomainFacts, Outcome, Plan, Tuned, read_plan
from polymask.benchmarks.search import Ladder, choose, ladders_of, learns_only_its_head, trials_of, with_values
from polymask.benchmarks.suites import Protocol, Suite, deviations
from polymask.core.base import Base
from polymask.core.registry import skeleton
from polymask.errors import BenchmarkError, near_matches
from polymask.files import check_name
from polymask.nets.zoo import load_base
from polymask.train.predict import accuracy, own_network
from polymask.train.recipe import Recipe, RecipeError, read_method
from polymask.train.state import plain

DOWN, UP = "down", "up"
SEARCH = "search"  # the folder of a search's jobs, among those of methods
_MAY_GROW = ("methods", "seeds", "command", "environment", "own_accuracy", "tuning", "protocols", "domains")


@dataclass(frozen=True)
class Request:
    """What somebody asks of a benchmark."""

    suite: Suite
    base: BaseName
    methods: Sequence[str]
    seeds: Sequence[int]
    protocol: Protocol
    out: Path
    directions: Sequence[str] = (DOWN, UP)  # for methods where the order counts
    cache: Path | None = None
    command: str = ""
    threads: int | None = None  # of each job; None: as many as this process has
    workers: str = "1"  # that do jobs at the same time
    ladders: Sequence[Ladder] = ()  # what to search for, for each method
    search_on: Sequence[str] = ()  # domains whose val decides; none: all of them

    @property
    def search_domains(self) -> tuple[str, ...]:
        """The domains of the search, in the suite's order."""
        return tuple(n for n in self.suite.domains if not self.search_on or n in self.search_on)

    @property
    def search_seed(self) -> int:
        return min(self.seeds)


def make_plan(request: Request) -> Plan:
    """Check all that can be checked, and write plan.json; what was searched before is kept."""
    base = load_base(request.base.name, weights=request.base.weights, device=request.base.device)
    methods = {text: read_method(text) for text in request.methods}
    if len(methods) < len(request.methods) or len(set(request.seeds)) < len(request.seeds):
        raise BenchmarkError(f"methods {', '.join(request.methods)} and seeds {request.seeds}: name each once")
    for row in methods.values():  # a method that this base cannot have says so
        method = row.method(request.protocol.recipe)
        method.check_own(request.suite.own is not None)
        skeleton(base, method.first_stage(), ["a", "b"])
    known = request.suite.domains
    for domain in known:
        check_name(domain)
    for domain, _ in request.protocol.classes:
        if domain and domain not in known:
            raise BenchmarkError(f"classes of {domain!r} are asked for; {near_matches(domain, known)}")
    for domain in request.search_on:
        if domain and domain not in known:
            raise BenchmarkError(f"a search on {domain!r} is asked for; {near_matches(domain, known)}")
    plan = _plan(request, base)
    _check_same(request.out, plan)
    for text in request.methods:
        _trials(request, plan, text)  # an earlier search of another kind is refused
    plan.write(request.out)
    return plan


def search_jobs(request: Request, plan: Plan) -> list[Job]:
    """The jobs of the searches that have not been made, by method and value."""
    return [
        job
        for text in request.methods
        for values in _trials(request, plan, text)
        for job in _trial_jobs(request, text, values)
    ]


def conclude(request: Request, plan: Plan, outcomes: Sequence[Outcome]) -> Plan:
    """The plan with what the searches have chosen, from what `search_jobs` found; written."""
    left, tuning = iter(outcomes), dict(plan.tuning)
    for text in request.methods:
        trials = [
            (values, list(islice(left, len(_trial_jobs(request, text, values)))))
            for values in _trials(request, plan, text)
        ]
        if trials:
            ladders = ladders_of(text, request.ladders)
            tuning[text] = choose(ladders, request.search_domains, request.search_seed, trials)
    plan = replace(plan, tuning=tuning)
    plan = replace(plan, protocols=_protocols(request, plan))
    plan.write(request.out)
    return plan


def final_jobs(request: Request, plan: Plan) -> list[Job]:
    """The jobs of the runs, by seed and method, each as the search has chosen."""
    jobs = []
    for seed in request.seeds:
        for text in request.methods:
            trained_as = with_values(text, plan.chosen(text))
            jobs += _jobs(request, text, trained_as, seed, request.out, tuple(request.suite.domains))
    return jobs


def _plan(request: Request, base: Base) -> Plan:
    suite, protocol = request.suite, request.protocol
    facts = {}
    for name, source in suite.domains.items():
        data = load_domain_data(name, source, protocol)
        test = None if data.test is None else len(data.test)
        facts[name] = DomainFacts(source, len(data.classes), len(data.train), len(data.val), test, data.notes)
    notes = {name: fact.notes for name, fact in facts.items() if fact.notes}
    before = _earlier(request.out)
    if before is not None and before.fingerprint == base.fingerprint:
        own_accuracy = before.own_accuracy
    else:
        own_accuracy = None if suite.own is None else _own_accuracy(base, *suite.own, protocol, request.cache)
    tuning = dict(() if before is None else before.tuning)
    for text in request.methods:
        fields = {ladder.field for ladder in ladders_of(text, request.ladders)}
        if fields and "head_rate" not in fields and learns_only_its_head(base, text, protocol.recipe):
            tuning[text] = Tuned((), (), request.search_seed, (), {}, "only its head learns")
    plan = Plan(
        benchmark=suite.name,
        base=base.name,
        fingerprint=base.fingerprint,
        parameters=sum(p.numel() for p in base.net.parameters()),
        methods=tuple(dict.fromkeys([*(() if before is None else before.methods), *request.methods])),
        seeds=tuple(sorted({*(() if before is None else before.seeds), *request.seeds})),
        recipe=plain(protocol.recipe.to_json()),
        selection=protocol.selection,
        crops=protocol.crops,
        domains=facts,
        own=None if suite.own is None else suite.own[0],
        own_accuracy=own_accuracy,
        deviations=deviations(suite, protocol, base.name, notes),
        command=request.command,
        environment=environment(request),
        tuning=tuning,
        protocols={} if before is None else before.protocols,
    )
    return replace(plan, protocols=_protocols(request, plan))


def _protocols(request: Request, plan: Plan) -> dict[str, dict[str, Any]]:
    """In which fields of its recipe each row differs from the plan's, by hand or by a search."""
    found = dict(plan.protocols)
    common = request.protocol.recipe
    for text in request.methods:
        row = read_method(with_values(text, plan.chosen(text))).recipe(common)
        then, now = plain(common.to_json()), plain(row.to_json())
        names = [*now, *(name for name in then if name not in now)]  # newer fields are there only where they are given
        found[text] = {name: now.get(name) for name in names if now.get(name) != then.get(name)}
    return {text: dict(differing) for text, differing in found.items() if differing}


def _trials(request: Request, plan: Plan, text: str) -> list[dict[str, Any]]:
    """The values that a method is still to be tried with."""
    ladders = ladders_of(text, request.ladders)
    trials = trials_of(text, ladders)
    made = plan.tuning.get(text)
    if made is None or not trials:
        return trials
    before = [dict(trial.values) for trial in made.trials], made.domains  # a seed that comes later may be smaller
    if made.trials and before != (trials, request.search_domains):
        raise BenchmarkError(
            f"{request.out} holds another search for {text} ({', '.join(made.fields)} on "
            f"{', '.join(made.domains)}); ask for the same, or give another --out"
        )
    return []


def _trial_jobs(request: Request, text: str, values: Mapping[str, Any]) -> list[Job]:
    label = folder_of(with_values("", values).lstrip(":"))
    searching = replace(request, directions=(DOWN,), protocol=replace(request.protocol, searching=True))
    out, trained_as = request.out / SEARCH / label, with_values(text, values)
    return _jobs(searching, text, trained_as, request.search_seed, out, request.search_domains)


def _own_accuracy(base: Base, name: str, source: str, protocol: Protocol, cache: Path | None) -> float | None:
    """The accuracy of the base with its own classifier on its own domain's test images."""
    data = load_domain_data(name, source, replace(protocol, limit=None, classes=()))
    if data.test is None or base.head is None:
        return None
    if not isinstance(base.head, nn.Linear) or base.head.out_features != len(data.classes):
        raise BenchmarkError(
            f"{source} has {len(data.classes)} classes, the base's classifier "
            f"{getattr(base.head, 'out_features', 'another form')}; take that folder out of the "
            "data, or give the base that was trained on it"
        )
    return accuracy(own_network(base), eval_loader(base, data, data.test, protocol, cache), base.placed)


def _earlier(out: Path) -> Plan | None:
    return read_plan(out / PLAN) if (out / PLAN).exists() else None


def _check_same(out: Path, plan: Plan) -> None:
    """A folder of runs holds runs of one plan, so that all its numbers can be compared."""
    before = _earlier(out)
    if before is None:
        return
    if differing := _differing(before.domains, plan.domains):
        raise BenchmarkError(f"{out} holds runs with {differing}; ask for the same, or give another --out")
    for field in fields(Plan):
        then, now = getattr(before, field.name), getattr(plan, field.name)
        if field.name == "recipe":  # a plan of an earlier version lacks what was not there yet
            then = plain(_recipe_of(out, then).to_json())
        if field.name not in _MAY_GROW and then != now:
            raise BenchmarkError(
                f"{out} holds runs with another {field.name} ({then}; now {now}); ask for the "
                "same, or give another --out"
            )


def _recipe_of(out: Path, fields: Mapping[str, Any]) -> Recipe:
    try:
        return Recipe(**fields)
    except (TypeError, RecipeError) as error:
        raise BenchmarkError(f"{out / PLAN} has a recipe of another version ({error}); give another --out") from error


def _differing(before: Mapping[str, DomainFacts], now: Mapping[str, DomainFacts]) -> str:
    """The first fact of a domain in which two plans differ; in which folder its own lies is none."""
    if list(before) != list(now):
        return f"the domains {', '.join(before)} (now {', '.join(now)})"
    for name, then in before.items():
        for field in fields(DomainFacts):
            old, new = (getattr(facts, field.name) for facts in (then, now[name]))
            if field.name == "source":
                old, new = Path(old).name, Path(new).name
            if old != new:
                return f"other images of {name} ({field.name}: {old}; now {new})"
    return ""


def folder_of(text: str) -> str:
    """A folder's name for a method with its options, which may have a path among them."""
    return text.replace(":", "+").replace("/", "_").replace("\\", "_")


def _jobs(request: Request, text: str, trained_as: str, seed: int, out: Path, names: Sequence[str]) -> list[Job]:
    """A job for each domain, or one for all of them where a method cannot treat them alone."""
    suite, protocol = request.suite, request.protocol
    method = read_method(trained_as).method(protocol.recipe)
    domains = tuple((name, suite.domains[name]) for name in names)
    groups: list[tuple[str, str, tuple[tuple[str, str], ...]]]
    if method.alone:
        groups = [("", domain[0], (domain,)) for domain in domains]
    else:
        orders = {DOWN: domains, UP: domains[::-1]}
        directions = request.directions if method.ordered else (DOWN,)
        groups = [(direction, f"together-{direction}", orders[direction]) for direction in directions]
    return [
        Job(
            base=request.base,
            method=text,
            trained_as=trained_as,
            domains=chosen,
            seed=seed,
            direction=direction,
            protocol=protocol,
            total=len(suite.domains) + 1,
            folder=out / folder_of(text) / part / f"seed-{seed}",
            own=suite.own,
            cache=request.cache,
        )
        for direction, part, chosen in groups
    ]


def environment(request: Request) -> dict[str, str]:
    """The versions and the machine that a run's numbers depend on; threads are those of a job."""
    return {
        "polymask": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(request.threads or torch.get_num_threads()),
        "workers": request.workers,
    }
