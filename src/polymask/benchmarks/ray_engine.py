"""Jobs on a Ray cluster: one task each, done again where a worker or a node dies.

A job keeps its checkpoints in a folder that all nodes share, so a task that is done again goes on
where the last one was cut.
"""

import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polymask.benchmarks.base_copy import copy_base
from polymask.benchmarks.jobs import BaseName, Job
from polymask.benchmarks.ray_cluster import (
    Share,
    check_nodes,
    connected,
    last_line,
    read_board,
    start_board,
)
from polymask.benchmarks.ray_tasks import Meeting, shared_name, versions, work
from polymask.benchmarks.records import RESULT
from polymask.benchmarks.shared_folder import Mirror, SharedFolder
from polymask.benchmarks.stopping import sigterm_as_ctrl_c
from polymask.benchmarks.tally import Tally
from polymask.errors import EngineError, InterruptedTraining

_RETRIES = 10  # deaths of a worker or a node that one job survives
_SAVING = 60.0  # seconds that jobs have to save when the driver is asked to stop


@dataclass(frozen=True)
class RayOptions:
    """Where the cluster is, and what a job gets of it; see `run_jobs`."""

    share: Share
    address: str | None = None
    threads: int | None = None
    shared: str | None = None


def run_on_ray(tally: Tally, options: RayOptions) -> None:
    """Do the jobs that wait; see `run_jobs`."""
    if not tally.waiting:
        return
    with connected(options.address) as ray, sigterm_as_ctrl_c():
        _Run(ray, tally, options).run()


class _Run:
    """One call of `run_on_ray`."""

    def __init__(self, ray: Any, tally: Tally, options: RayOptions) -> None:
        self.ray, self.tally, self.options = ray, tally, options
        self.jobs = {number: _absolute(tally.jobs[number]) for number in tally.waiting}
        # What all jobs have in common: the folder of their runs.
        self.root = Path(os.path.commonpath([job.folder.absolute().parent for job in tally.jobs]))
        self.shared = None if options.shared is None else SharedFolder(options.shared)
        names = {shared_name(job) for job in self.jobs.values()}
        if self.shared is not None and len(names) < len(self.jobs):
            raise EngineError(
                f"{len(self.jobs)} jobs have {len(names)} names in {self.shared.url}; let the last "
                "three parts of their folders differ"
            )

    def run(self) -> None:
        """Check the cluster, then do the jobs."""
        meeting = self._meet()
        board = start_board(self.ray)  # a process, which starts while the nodes are asked
        try:
            check_nodes(self.ray, self.options.share, meeting, list(self.jobs.values()))
            self.jobs = {n: job for n, job in self.jobs.items() if not self._collect_done(n)}
            self._work(meeting, board)
        finally:
            board.shutdown(force=True)
            self._part(meeting)

    def _meet(self) -> Meeting:
        token = (f".token-{uuid.uuid4().hex}", uuid.uuid4().hex)
        if self.shared is None:
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / token[0]).write_text(token[1])
        else:
            self.shared.write(token[0], token[1].encode())
        root = str(self.root) if self.shared is None else self.shared.url
        return Meeting(root, token, str(Path.cwd()), versions(), self.shared is not None)

    def _part(self, meeting: Meeting) -> None:
        if self.shared is None:
            (self.root / meeting.token[0]).unlink(missing_ok=True)
        else:
            self.shared.delete(meeting.token[0])

    def _work(self, meeting: Meeting, board: Any) -> None:
        """Start a task for every job, and listen until all have ended."""
        task = self.ray.remote(work)
        options = {
            "num_cpus": self.options.share.cpus,
            "num_gpus": self.options.share.gpus,
            "max_retries": _RETRIES,
            "retry_exceptions": [InterruptedTraining],  # its node was told to stop
        }
        threads = self.options.threads or max(1, int(self.options.share.cpus))
        bases = self._copied_bases()
        running = {}
        for number, job in self.jobs.items():
            sent = replace(job, base=bases[job.base])
            named = task.options(name=job.title, **options)  # `ps` and Ray's own tools show it
            running[named.remote(number, sent, meeting, threads, board.actor)] = number
        try:
            while running:
                ready, _ = self.ray.wait(list(running), timeout=0.5)
                self._hear(board)
                for answer in ready:
                    self._close(answer, running.pop(answer))
        finally:
            for answer in running:  # only where something stops the driver
                self.ray.cancel(answer)
            if running:
                self.ray.wait(list(running), num_returns=len(running), timeout=_SAVING)

    def _hear(self, board: Any) -> None:
        """Pass on what jobs have told; a message may come after its job has ended."""
        try:
            told = read_board(board)
        except self.ray.exceptions.RayError as error:
            raise EngineError(
                f"the cluster has dropped the driver ({last_line(error)}); run the same again to "
                "go on. If that is at once, give driver and nodes the same RAY_AUTH_MODE"
            ) from error
        waiting = set(self.tally.waiting)
        for what, number, *details in told:
            if number in waiting:
                getattr(self.tally, what)(number, *details)

    def _copied_bases(self) -> dict[BaseName, BaseName]:
        bases = {base: copy_base(base, self.root) for base in {j.base for j in self.jobs.values()}}
        if self.shared is not None:
            for copy in bases.values():
                file = Path(copy.name) if copy.weights is None else copy.weights
                if self.shared.read(file.name) is None:
                    self.shared.write(file.name, file.read_bytes())
        return bases

    def _close(self, answer: Any, number: int) -> None:
        try:
            how, why = self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            how, why = "failed", f"{last_line(error)}; run again to go on with it"
        if how == "failed":
            self.tally.failed(number, str(why))
        elif not self._collect_done(number):
            self.tally.failed(number, f"its result is not in {self.jobs[number].folder}")

    def _collect_done(self, number: int) -> bool:
        """Take note of a job that is done; its files come here where they are elsewhere."""
        job = self.jobs[number]
        if self.shared is not None and RESULT in self.shared.names(shared_name(job)):
            Mirror(self.shared, shared_name(job), job.folder).pull()
        outcome = job.outcome()
        if outcome is None:
            return False
        self.tally.finished(number, outcome)
        return True


def _absolute(job: Job) -> Job:
    return replace(
        job,
        folder=job.folder.absolute(),
        cache=None if job.cache is None else job.cache.absolute(),
    )
