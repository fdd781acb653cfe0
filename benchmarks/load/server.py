"""`polymask serve` as a process, clients that send to it, and its memory."""

import http.client
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from load.requests import FORM


@dataclass
class Load:
    """What clients saw."""

    times: list[float] = field(default_factory=list)  # seconds, of requests that were answered
    refused: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.times) / self.seconds


def percentiles(times: list[float]) -> dict[str, float]:
    """Of seconds, in milliseconds."""
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50_ms": 1000 * float(p50), "p99_ms": 1000 * float(p99)}


class Server:
    """`polymask serve` on a free port."""

    def __init__(self, library: Path, *flags: str) -> None:
        self.log = library.with_name("log")
        command = [sys.executable, "-m", "polymask", "serve", str(library), "--port", "0"]
        command += ["--no-request-log", "--timeout", "120", *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)

    def __enter__(self) -> "Server":
        try:
            while True:
                time.sleep(0.2)
                text = self.log.read_text()
                if self.process.poll() is not None:
                    raise SystemExit(f"the server did not start: {text}")
                if found := re.search(r"serving .*:(\d+)\b", text):
                    self.port = int(found[1])
                    try:
                        self.get("/readyz")
                        return self
                    except OSError:
                        continue
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def get(self, target: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", target)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def counts(self) -> dict[str, float]:
        """The cache's hits and misses so far."""
        text = self.get("/metrics")
        return {
            name: float(re.search(rf"^polymask_cache_{name}_total (\S+)", text, re.M)[1]) for name in ("hits", "misses")
        }

    def resident(self) -> float:
        """Megabytes of the server's processes, shared pages counted once."""
        pids = [self.process.pid]
        children = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()
        total = 0
        for pid in [*pids, *children]:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss: +(\d+)", text, re.M)[1])
        return total / 1024

    def warm_up(self, bodies: list[bytes], order: Iterator[int], count: int, clients: int) -> None:
        """Send this many requests and ignore the results."""
        first = list(islice(order, count))
        self.load(bodies, lambda seed: iter(first[seed::clients]), clients, float("inf"))

    def load(
        self,
        bodies: list[bytes],
        order_of: Callable[[int], Iterator[int]],
        clients: int,
        seconds: float,
    ) -> Load:
        """Send for this long, each client in its own order, one request after another."""
        found, failed, lock = Load(), [], threading.Lock()
        began = time.perf_counter()

        def client(seed: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
            for place in order_of(seed):
                start = time.perf_counter()
                if start - began > seconds or failed:
                    break
                connection.request("POST", "/v1/predict", bodies[place], FORM)
                reply = connection.getresponse()
                content = reply.read()
                with lock:
                    if reply.status == 200:
                        found.times.append(time.perf_counter() - start)
                    elif reply.status in (429, 503):
                        found.refused += 1
                    else:
                        failed.append((reply.status, content[:200]))
                if reply.status in (429, 503):
                    time.sleep(float(reply.headers["Retry-After"]))
            connection.close()

        threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise SystemExit(f"the server answered {failed[0]}; its log ends:\n{self.log.read_text()[-3000:]}")
        found.seconds = time.perf_counter() - began
        return found


class Memory:
    """The server's memory in megabytes, sampled once per second."""

    def __init__(self, server: Server) -> None:
        self.samples: list[float] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(server,), daemon=True)
        self._thread.start()

    def _watch(self, server: Server) -> None:
        while not self._done.wait(1):
            self.samples.append(server.resident())

    def stop(self) -> dict[str, float]:
        """Stop, and compare memory in the second half with the first."""
        self._done.set()
        self._thread.join()
        half = len(self.samples) // 2
        if half < 2:
            return {}
        minutes = np.arange(len(self.samples) - half) / 60
        return {
            "resident_mb_first_half": float(np.mean(self.samples[:half])),
            "resident_mb_second_half": float(np.mean(self.samples[half:])),
            "resident_mb_most": float(np.max(self.samples)),
            "resident_mb_per_minute_at_the_end": float(np.polyfit(minutes, self.samples[half:], 1)[0]),
        }
