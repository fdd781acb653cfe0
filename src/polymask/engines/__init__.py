"""Where jobs run: this process, several processes of this machine, or a Ray cluster."""

from polymask.engines.running import Engine, run_jobs
from polymask.engines.watcher import Watcher

__all__ = ["Engine", "Watcher", "run_jobs"]
