"""Image files of strangers, decoded in processes of their own, within bounds of pixels, shape, time and memory.

A decoder is a process that takes one file after another from a pipe. One that needs too much time or memory is killed
and another takes its place, so a file can stop nothing but its own request. Few of them work on costly files at a time,
those of many pixels or that took long at the first try, so these neither fill the memory nor keep others waiting. This
module imports no torch: a decoder is ready in a fraction of a second.
"""

import asyncio
import io
import json
import resource
import signal
import struct
import sys
import warnings
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from polymask.data.split import DAMAGED, Shrink, require_vision, to_rgb
from polymask.errors import DataError
from polymask.serve.settings import Refusal

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow can open more, some by running other programs
RATIO = 50  # of the longer side to the shorter: beyond it an image is no picture of anything
_QUICK_PIXELS = 4_000_000  # that are decoded (a JPEG may be decoded at an eighth of its size): more are costly
_QUICK_SECONDS = 0.5  # of a core: what takes longer is costly
_PIECE = 1 << 16  # bytes that are written to a decoder at a time
_START = "import os; os.nice(5); from polymask.serve.decoding import main; main()"  # the networks that answer go first
_HEAD = struct.Struct(">II")  # bytes of the JSON, bytes of what follows it


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one image may cost."""

    max_pixels: int
    seconds: float  # of a core
    memory: int  # bytes, beyond what an idle decoder has


class _CostlyError(Exception):
    """A file is not to be decoded beside many others."""


class Decoders:
    """Up to `most` decoders of files, and a quarter as many of costly ones, started when they are needed.

    Use it in one event loop.
    """

    def __init__(self, bounds: Bounds, most: int) -> None:
        self.bounds, self._most = bounds, most
        self._quick, self._costly = asyncio.Semaphore(most), asyncio.Semaphore(max(1, most // 4))
        self._idle: list[Process] = []
        self._closed = False

    async def decode(self, data: bytes | bytearray, shrink: Shrink) -> NDArray[np.uint8]:
        """One file, made small: uint8 (H, W, 3)."""
        with suppress(_CostlyError):
            async with self._quick:
                return await self._attempt(data, shrink, quick=True)
        async with self._costly:
            return await self._attempt(data, shrink, quick=False)

    async def _attempt(self, data: bytes | bytearray, shrink: Shrink, *, quick: bool) -> NDArray[np.uint8]:
        async with self._decoder() as decoder:
            assert decoder.stdin is not None
            assert decoder.stdout is not None
            try:
                _send(decoder.stdin, {"shrink": asdict(shrink), "quick": quick}, len(data))
                for start in range(0, len(data), _PIECE):  # the pipe would keep a copy of what does not go in
                    decoder.stdin.write(bytes(memoryview(data)[start : start + _PIECE]))
                    await decoder.stdin.drain()
                sizes = _HEAD.unpack(await decoder.stdout.readexactly(_HEAD.size))
                answer = json.loads(await decoder.stdout.readexactly(sizes[0]))
                pixels = await decoder.stdout.readexactly(sizes[1])
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if await decoder.wait() == -signal.SIGPROF:
                    if quick:
                        raise _CostlyError from error
                    seconds = f"{self.bounds.seconds:g}"
                    raise Refusal(
                        422, f"the image takes more than {seconds} s to decode; send a simpler file"
                    ) from error
                raise Refusal(422, "the image cannot be decoded") from error
        if "costly" in answer:
            raise _CostlyError
        if "status" in answer:
            raise Refusal(answer["status"], answer["message"])
        return np.frombuffer(bytearray(pixels), np.uint8).reshape(answer["shape"])

    async def close(self) -> None:
        """End all decoders."""
        self._closed = True
        while self._idle:
            await _end(self._idle.pop())

    @asynccontextmanager
    async def _decoder(self) -> AsyncIterator[Process]:
        """A decoder for one file; it is killed unless the file is done with."""
        self._idle = [decoder for decoder in self._idle if decoder.returncode is None]
        decoder = self._idle.pop() if self._idle else await self._start()
        done = False
        try:
            yield decoder
            done = True
        finally:
            if done and decoder.returncode is None and len(self._idle) < self._most and not self._closed:
                self._idle.append(decoder)
            else:
                await _end(decoder)

    async def _start(self) -> Process:
        bounds = json.dumps(asdict(self.bounds))
        command = (sys.executable, "-c", _START, bounds)
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)


async def _end(decoder: Process) -> None:
    with suppress(ProcessLookupError):
        decoder.kill()
    await decoder.wait()


def _send(pipe: Any, head: dict[str, Any], size: int = 0) -> None:
    """Write a head, and how many bytes will follow it."""
    text = json.dumps(head).encode()
    pipe.write(_HEAD.pack(len(text), size) + text)


def main() -> None:
    """Decode what comes in until nothing more does."""
    bounds = Bounds(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    files, answers = sys.stdin.buffer, sys.stdout.buffer
    _warm_up()
    _bound_memory(bounds.memory)
    while head := files.read(_HEAD.size):
        sizes = _HEAD.unpack(head)
        asked = json.loads(files.read(sizes[0]))
        data = files.read(sizes[1])
        # What this runs is C: only the signal's own action, the end of the process, comes in time.
        signal.setitimer(signal.ITIMER_PROF, min(_QUICK_SECONDS, bounds.seconds) if asked["quick"] else bounds.seconds)
        most = _QUICK_PIXELS if asked["quick"] else bounds.max_pixels
        _answer(answers, data, Shrink(**asked["shrink"]), bounds.max_pixels, most)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del data  # it may be long until the next one


def _answer(pipe: BinaryIO, data: bytes, shrink: Shrink, max_pixels: int, most: int) -> None:
    try:
        pixels = np.ascontiguousarray(decode(data, shrink, max_pixels, most))
    except Refusal as error:
        _send(pipe, {"status": error.status, "message": str(error)})
    except _CostlyError:
        _send(pipe, {"costly": True})
    else:
        _send(pipe, {"shape": pixels.shape}, pixels.nbytes)
        pipe.write(pixels.data)
    pipe.flush()


def decode(data: bytes, shrink: Shrink, max_pixels: int, most: int) -> NDArray[np.uint8]:
    """One image file of at most `max_pixels`, made small: uint8 (H, W, 3); costly beyond `most` that are decoded."""
    pil = require_vision("PIL.Image")
    try:
        with pil.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image.size, max_pixels)
            image.draft(None, (2 * shrink.side, 2 * shrink.side))
            if image.width * image.height > most:
                raise _CostlyError
            return shrink(to_rgb(image, "the image"))
    except (Refusal, _CostlyError):
        raise
    except MemoryError as error:
        raise Refusal(413, "the image takes too much memory to decode; send a smaller one") from error
    except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
        raise Refusal(413, "the image has too many pixels") from error
    except pil.UnidentifiedImageError as error:
        raise Refusal(415, f"not an image that can be read; send one of {', '.join(FORMATS)}") from error
    except DataError as error:
        raise Refusal(422, str(error)) from error
    except (*DAMAGED, Warning) as error:
        raise Refusal(422, "the image is damaged") from error


def _check_size(shape: tuple[int, int], max_pixels: int) -> None:
    width, height = shape
    size = f"an image of {width} × {height} pixels"
    if width * height > max_pixels:
        raise Refusal(413, f"{size} is too large; send at most {max_pixels:,} pixels")
    if max(width, height) > RATIO * min(width, height):
        raise Refusal(422, f"{size} is too long for its width; send one of at most {RATIO} : 1")


def _warm_up() -> None:
    """Load Pillow and its plugins before memory is bounded; its warnings have no place among the server's logs."""
    pil = require_vision("PIL.Image")
    pil.init()
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", pil.DecompressionBombWarning)


def _bound_memory(more: int) -> None:
    """Where the system tells how much memory a process has, let it have only so much more."""
    mapped = Path("/proc/self/statm")
    if mapped.exists():
        limit = int(mapped.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
