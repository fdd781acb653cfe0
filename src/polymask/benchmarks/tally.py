"""What has become of each job, and whom to tell."""

from collections.abc import Sequence

from polymask.benchmarks.jobs import Job
from polymask.benchmarks.records import Outcome
from polymask.benchmarks.watcher import Watcher
from polymask.errors import BenchmarkError


class Tally:
    """Jobs by number: those that wait, what was found, what failed. Tells the watcher of all."""

    def __init__(self, jobs: Sequence[Job], watcher: Watcher | None = None) -> None:
        self.jobs, self.watcher = jobs, watcher or Watcher()
        self.outcomes: dict[int, Outcome] = {}
        self.failures: dict[int, str] = {}
        for number, job in enumerate(jobs):
            done = job.outcome()
            if done is not None:
                self.finished(number, done)

    @property
    def waiting(self) -> list[int]:
        """The jobs that are neither done nor failed."""
        closed = self.outcomes.keys() | self.failures.keys()
        return [number for number in range(len(self.jobs)) if number not in closed]

    def started(self, number: int) -> None:
        """A job begins, or goes on where it was cut."""
        self.watcher.started(self.jobs[number])

    def progressed(self, number: int, share: float, note: str) -> None:
        """So much of a job's epochs is done, 0 … 1."""
        self.watcher.progressed(self.jobs[number], share, note)

    def finished(self, number: int, outcome: Outcome) -> None:
        """A job is done."""
        self.outcomes[number] = outcome
        self.watcher.finished(self.jobs[number], outcome)

    def failed(self, number: int, why: str) -> None:
        """A job cannot be done; the others go on."""
        self.failures[number] = why
        self.watcher.failed(self.jobs[number], why)

    def result(self) -> list[Outcome]:
        """What all jobs found, in order; all failures as one error."""
        if self.failures:
            listed = "; ".join(f"{self.jobs[n].title}: {why}" for n, why in self.failures.items())
            raise BenchmarkError(f"{len(self.failures)} of {len(self.jobs)} jobs failed: {listed}")
        return [self.outcomes[number] for number in range(len(self.jobs))]
