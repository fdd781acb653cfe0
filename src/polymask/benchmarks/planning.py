"""From what is asked of a benchmark to its jobs, with everything checked before any training."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from polymask._version import __version__
from polymask.base import Base, load_base
from polymask.benchmarks.jobs import BaseName, Job, load_domain_data, parse_method
from polymask.benchmarks.protocol import Protocol, deviations
from polymask.benchmarks.records import PLAN, DomainFacts, Plan, read_record
from polymask.benchmarks.suites import Suite
from polymask.data import DomainData, Loader, cache_splits, eval_transform, shrink_for
from polymask.domain import skeleton
from polymask.errors import BenchmarkError, near_matches
from polymask.model import check_name
from polymask.predict import accuracy, own_network
from polymask.run import plain

DOWN, UP = "down", "up"
_MAY_GROW = ("methods", "seeds", "command", "environment", "own_accuracy")


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


def make_plan(request: Request) -> tuple[Plan, list[Job]]:
    """Check all that can be checked, write plan.json, and give the jobs, by seed and method."""
    base = load_base(request.base.name, weights=request.base.weights, device=request.base.device)
    methods = {text: parse_method(text) for text in request.methods}
    if len(methods) < len(request.methods) or len(set(request.seeds)) < len(request.seeds):
        raise BenchmarkError(
            f"methods {', '.join(request.methods)} and seeds {request.seeds}: name each once"
        )
    for method in methods.values():
        skeleton(base, method, ["a", "b"])  # a method that this base cannot have says so
    known = {"", *request.suite.domains}
    for domain in request.suite.domains:
        check_name(domain)
    for domain, _ in request.protocol.classes:
        if domain not in known:
            raise BenchmarkError(
                f"classes of {domain!r} are asked for; {near_matches(domain, known - {''})}"
            )
    plan = _plan(request, base)
    _check_same(request.out, plan)
    plan.write(request.out)
    return plan, _jobs(request, plan)


def _plan(request: Request, base: Base) -> Plan:
    suite, protocol = request.suite, request.protocol
    facts = {
        name: _facts(source, load_domain_data(name, source, protocol))
        for name, source in suite.domains.items()
    }
    notes = {name: fact.notes for name, fact in facts.items() if fact.notes}
    before = _earlier(request.out)
    own = None if suite.own is None else suite.own[0]
    if before is not None and before.fingerprint == base.fingerprint:
        own_accuracy = before.own_accuracy
    else:
        own_accuracy = (
            None if suite.own is None else _own_accuracy(base, *suite.own, protocol, request.cache)
        )
    earlier_methods = () if before is None else before.methods
    earlier_seeds = () if before is None else before.seeds
    return Plan(
        benchmark=suite.name,
        base=base.name,
        fingerprint=base.fingerprint,
        parameters=sum(p.numel() for p in base.net.parameters()),
        methods=tuple(dict.fromkeys([*earlier_methods, *request.methods])),
        seeds=tuple(sorted({*earlier_seeds, *request.seeds})),
        recipe=plain(protocol.recipe.to_json()),
        selection=protocol.selection,
        crops=protocol.crops,
        domains=facts,
        own=own,
        own_accuracy=own_accuracy,
        deviations=deviations(suite, protocol, base.name, notes),
        command=request.command,
        environment=environment(request),
    )


def _facts(source: str, data: DomainData) -> DomainFacts:
    return DomainFacts(
        source=source,
        classes=len(data.classes),
        train=len(data.train),
        val=len(data.val),
        test=None if data.test is None else len(data.test),
        notes=data.notes,
    )


def _own_accuracy(
    base: Base, name: str, source: str, protocol: Protocol, cache: Path | None
) -> float | None:
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
    spec = protocol.recipe.input(base.input)
    (cached,) = cache_splits([data.test], shrink_for(data, spec), folder=cache)
    crops = eval_transform(data, spec, crops=protocol.crops_of(data.mirror))
    images = Loader(cached, crops, batch_size=64)
    return accuracy(own_network(base), images, base)


def _earlier(out: Path) -> Plan | None:
    return Plan.from_json(read_record(out / PLAN)) if (out / PLAN).exists() else None


def _check_same(out: Path, plan: Plan) -> None:
    """A folder of runs holds runs of one plan, so that all its numbers can be compared."""
    before = _earlier(out)
    if before is None:
        return
    for field in fields(Plan):
        then, now = getattr(before, field.name), getattr(plan, field.name)
        if field.name not in _MAY_GROW and then != now:
            raise BenchmarkError(
                f"{out} holds runs with another {field.name} ({then}; now {now}); ask for the "
                "same, or give another --out"
            )


def _jobs(request: Request, plan: Plan) -> list[Job]:
    suite, jobs = request.suite, []
    domains = tuple(suite.domains.items())
    for seed in request.seeds:
        for text in request.methods:
            method = parse_method(text)
            for direction, chosen in _groups(method.alone, method.ordered, domains, request):
                part = f"together-{direction}" if direction else chosen[0][0]
                jobs.append(
                    Job(
                        base=request.base,
                        method=text,
                        domains=chosen,
                        seed=seed,
                        direction=direction,
                        protocol=request.protocol,
                        total=len(plan.domains) + 1,
                        folder=request.out / text.replace(":", "+") / part / f"seed-{seed}",
                        own=suite.own,
                        cache=request.cache,
                    )
                )
    return jobs


def _groups(
    alone: bool, ordered: bool, domains: tuple[tuple[str, str], ...], request: Request
) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    if alone:
        return [("", (domain,)) for domain in domains]
    if not ordered:
        return [(DOWN, domains)]
    orders = {DOWN: domains, UP: domains[::-1]}
    return [(direction, orders[direction]) for direction in request.directions]


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
