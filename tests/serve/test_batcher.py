"""Requests are grouped by domain, bounded, and answered in order of age."""

import asyncio
import threading
from dataclasses import dataclass

import pytest
import torch

from polymask.serve.batcher import Batcher
from polymask.serve.settings import Refusal


@dataclass(frozen=True)
class Target:
    key: str


A, B = Target("a"), Target("b")


class Recorder:
    """Doubles images, and remembers what was run together."""

    def __init__(self):
        self.batches = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, target, images):
        assert self.gate.wait(20)
        self.batches.append((target.key, len(images)))
        if target.key == "broken":
            raise ValueError("no such luck")
        return 2 * images


def images(*values):
    return torch.tensor(values, dtype=torch.float32).view(-1, 1)


def run(work, recorder=None, **options):
    recorder = recorder or Recorder()

    async def main():
        batcher = Batcher(recorder, **({"window": 0.01} | options))
        try:
            return await work(batcher)
        finally:
            recorder.gate.set()
            await batcher.close()

    return asyncio.run(main()), recorder


def test_requests_for_one_domain_run_together_and_each_gets_its_own_answer():
    async def work(batcher):
        return await asyncio.gather(*(batcher.submit(A, images(i, i)) for i in range(5)))

    answers, recorder = run(work, window=1.0, max_batch=10)
    assert recorder.batches == [("a", 10)]
    for i, answer in enumerate(answers):
        assert answer.flatten().tolist() == [2 * i, 2 * i]


def test_domains_are_never_mixed_in_a_batch():
    async def work(batcher):
        targets = [A, B, A, B, A]
        await asyncio.gather(*(batcher.submit(t, images(1)) for t in targets))

    _, recorder = run(work)
    assert sorted(recorder.batches) == [("a", 3), ("b", 2)]


def test_a_full_batch_does_not_wait_for_the_window():
    async def work(batcher):
        async with asyncio.timeout(20):
            await asyncio.gather(*(batcher.submit(A, images(1)) for _ in range(4)))

    _, recorder = run(work, window=3600.0, max_batch=4)
    assert recorder.batches == [("a", 4)]


def test_a_request_larger_than_a_batch_is_run_in_pieces():
    async def work(batcher):
        return await batcher.submit(A, images(*range(10)))

    answer, recorder = run(work, max_batch=4)
    assert [count for _, count in recorder.batches] == [4, 4, 2]
    assert answer.flatten().tolist() == [2 * i for i in range(10)]


def test_the_group_whose_first_request_is_oldest_goes_first():
    async def work(batcher):
        recorder.gate.clear()
        first = asyncio.ensure_future(batcher.submit(Target("first"), images(0)))
        await asyncio.sleep(0)
        late = [asyncio.ensure_future(batcher.submit(B, images(1)))]
        await asyncio.sleep(0.001)
        late += [asyncio.ensure_future(batcher.submit(A, images(1))) for _ in range(3)]
        await asyncio.sleep(0.05)
        recorder.gate.set()
        await asyncio.gather(first, *late)

    recorder = Recorder()
    run(work, recorder, window=0.0, max_batch=2, runners=1)
    assert [key for key, _ in recorder.batches] == ["first", "b", "a", "a"]


def test_what_does_not_fit_in_the_queue_is_refused_with_a_time_to_come_back():
    async def work(batcher):
        with batcher.room_for(6):
            with pytest.raises(Refusal) as refused, batcher.room_for(5):
                pass
            with batcher.room_for(4):
                pass
        with batcher.room_for(10):
            return refused.value

    refusal, _ = run(work, max_queue=10)
    assert refusal.status == 429
    assert int(refusal.headers["Retry-After"]) >= 1


def test_a_failure_reaches_every_request_of_its_batch_and_no_other():
    async def work(batcher):
        return await asyncio.gather(
            batcher.submit(Target("broken"), images(1)),
            batcher.submit(Target("broken"), images(2)),
            batcher.submit(A, images(3)),
            return_exceptions=True,
        )

    (one, two, three), _ = run(work)
    assert isinstance(one, ValueError)
    assert isinstance(two, ValueError)
    assert three.item() == 6


def test_a_request_whose_sender_gave_up_is_not_run():
    async def work(batcher):
        recorder.gate.clear()
        blocking = asyncio.ensure_future(batcher.submit(A, images(1)))
        await asyncio.sleep(0.05)
        gone = asyncio.ensure_future(batcher.submit(B, images(2)))
        await asyncio.sleep(0)
        gone.cancel()
        recorder.gate.set()
        await blocking

    recorder = Recorder()
    run(work, recorder, window=0.0, runners=1)
    assert recorder.batches == [("a", 1)]


def test_closing_answers_what_is_waiting():
    async def work(batcher):
        waiting = [asyncio.ensure_future(batcher.submit(A, images(i))) for i in range(3)]
        await asyncio.sleep(0)
        await batcher.close()
        return [task.result().item() for task in waiting]

    answers, _ = run(work, window=3600.0)
    assert answers == [0, 2, 4]
