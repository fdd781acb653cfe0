"""One call for jobs, wherever they run."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from polymask.benchmarks.jobs import Job
from polymask.benchmarks.local import run_locally
from polymask.benchmarks.records import Outcome
from polymask.benchmarks.tally import Tally
from polymask.benchmarks.watcher import Watcher
from polymask.errors import EngineError, InterruptedTraining

Engine = Literal["local", "ray"]


def run_jobs(
    jobs: Sequence[Job],
    *,
    engine: Engine = "local",
    workers: int = 1,
    threads: int | None = None,
    watcher: Watcher | None = None,
    address: str | None = None,
    cpus_per_job: float = 1,
    gpus_per_job: float = 0,
    shared: str | None = None,
) -> list[Outcome]:
    """Do all jobs; those that are done are only read. Gives what was found, in order.

    A job that fails does not stop the others; in the end the failures are one error. Ctrl-C and
    SIGTERM let the jobs that run save, and raise `InterruptedTraining`. Results do not depend on
    the engine, only on `threads`, those of each job.

    "local" runs jobs in this process, or in `workers` processes. "ray" runs them on the Ray cluster
    at `address` ("auto", or HOST:PORT; None starts one of its own on this machine), each with
    `cpus_per_job` and `gpus_per_job`, and again where a worker or a node dies. There the jobs'
    folders must be on a file system that all nodes share, or `shared` be the URL (of any kind that
    fsspec knows) of one.
    """
    if engine not in get_args(Engine):
        raise EngineError(f"engine {engine!r} is not one of {', '.join(get_args(Engine))}")
    each = threads_of_a_job(engine, workers, threads, cpus_per_job)
    tally = Tally(jobs, watcher)
    try:
        if engine == "ray":
            from polymask.benchmarks.ray_cluster import Share
            from polymask.benchmarks.ray_engine import RayOptions, run_on_ray

            share = Share(cpus_per_job, gpus_per_job)
            run_on_ray(tally, RayOptions(share, address, each, shared))
        else:
            run_locally(tally, workers=workers, threads=each)
    except (KeyboardInterrupt, InterruptedTraining) as stopped:
        raise InterruptedTraining(
            f"stopped with {len(tally.outcomes)} of {len(jobs)} jobs done; those that ran have "
            "saved: run the same again to go on"
        ) from stopped
    return tally.result()


def threads_of_a_job(engine: Engine, workers: int, threads: int | None, cpus_per_job: float = 1) -> int:
    """How many threads each job runs with: those asked for, or its share of the cores."""
    if threads is not None:
        return threads
    if engine == "ray":
        return max(1, int(cpus_per_job))
    return max(1, torch.get_num_threads() // max(1, workers))
