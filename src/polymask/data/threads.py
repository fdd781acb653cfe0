"""Work done by threads a bounded number of steps ahead, its results in order."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int
) -> Generator[Result, None, None]:
    """Yield work(item) for each item in turn, with at most `ahead` results waiting.

    An exception of `work` is raised where its result would have come. Closing the iterator early
    drops what has not begun and waits for what has, so no thread is left behind.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="polymask-data")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def default_workers() -> int:
    """One thread for each core, eight at most."""
    return min(8, os.cpu_count() or 1)
