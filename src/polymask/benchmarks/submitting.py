"""From a benchmark's packs to the decathlon's results.json, one for each method, order and seed."""

from collections.abc import Sequence
from pathlib import Path

from polymask.benchmarks.jobs import Job, load_base_of, load_domain_data
from polymask.benchmarks.numbering import NUMBERINGS
from polymask.benchmarks.submission import write_submission
from polymask.core.base import Base
from polymask.data.cache import cache_splits, shrink_for
from polymask.data.images import DomainData
from polymask.data.loader import Loader
from polymask.data.transforms import eval_transform
from polymask.errors import BenchmarkError
from polymask.pack.format import SUFFIX
from polymask.pack.loading import load_domain
from polymask.train.predict import logits, network, own_network


def write_submissions(jobs: Sequence[Job], out: Path) -> list[Path]:
    """Predict every test image with the jobs' packs and write METHOD/results….json.

    A file is for the challenge's server only if the run has all ten domains in full; with fewer it
    holds the answers for those, and is good for offline comparison.
    """
    groups: dict[Path, list[Job]] = {}
    for job in jobs:
        order = f"-{job.direction}" if job.direction else ""
        path = job.folder.parent.parent / f"results{order}-seed-{job.seed}.json"
        groups.setdefault(path, []).append(job)
    for path, group in groups.items():
        answers: dict[str, dict[str | int, int]] = {}
        for job in group:
            base = load_base_of(job.base)
            for name, source in job.domains:
                pack = job.folder / "packs" / f"{name}{SUFFIX}"
                answers[name] = _answers(base, job, name, source, pack)
            if job.own is not None and "imagenet12" not in answers:
                answers["imagenet12"] = _answers(base, job, *job.own, None)
        complete = set(answers) == set(NUMBERINGS)
        write_submission(path, answers, complete=complete)
    return list(groups)


def _answers(base: Base, job: Job, name: str, source: str, pack: Path | None) -> dict[str | int, int]:
    data = load_domain_data(name, source, job.protocol)
    if data.submission is None:
        raise BenchmarkError(f"{source} has nothing to submit; run without --classes")
    loader = _loader(data, base, job)
    net = own_network(base) if pack is None else network(base, load_domain(pack, base))
    found: dict[str | int, int] = {}
    numbers = iter(data.submission.image_ids.tolist())
    for images, _ in loader.batches():
        for label in logits(net, base.placed(images)).argmax(1).tolist():
            found[next(numbers)] = label
    return found


def _loader(data: DomainData, base: Base, job: Job) -> Loader:
    assert data.submission is not None
    spec = job.protocol.recipe.input(base.input)
    (cache,) = cache_splits([data.submission.images], shrink_for(data, spec), folder=job.cache)
    crops = job.protocol.crops_of(data.mirror)
    return Loader(cache, eval_transform(data, spec, crops=crops), batch_size=64)
