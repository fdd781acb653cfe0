"""What wants to know how jobs go."""

from polymask.benchmarks.jobs import Job
from polymask.benchmarks.records import Outcome


class Watcher:
    """Told of every job, in the process that asked for them; does nothing unless overridden."""

    def started(self, job: Job) -> None:
        """A job begins, or goes on where it was cut."""

    def progressed(self, job: Job, share: float, note: str) -> None:
        """So much of a job's epochs is done (of its current domain and stage), 0 … 1."""

    def finished(self, job: Job, outcome: Outcome) -> None:
        """A job is done, now or before."""

    def failed(self, job: Job, error: str) -> None:
        """A job cannot be done; the others go on."""
