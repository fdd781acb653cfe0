"""Small libraries and clients that the tests of the server share."""

import base64
import io
import socket
import struct
import threading
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import uvicorn
from PIL import Image

from nets import tiny_base, trained
from polymask.core.unknown import Judgement, Unknown
from polymask.serve import Settings, create_app
from polymask.serve.process import ImpatientProtocol

BASE = tiny_base()
PATIENCE = 60  # seconds that a test waits for what must happen
LOCAL = "http://localhost"
TOKEN = "0123456789abcdef0123"
BYTES = {"Content-Type": "application/octet-stream"}
JSON = {"Content-Type": "application/json"}


def pack(path: Path, *, classes: int = 3, seed: int = 0, method: str = "affine-full") -> bytes:
    """Write a trained pack; its bytes."""
    trained(BASE, method, classes=classes, seed=seed).save(path)
    return path.read_bytes()


def judging_pack(path: Path, threshold: float, *, seed: int = 0) -> None:
    """Write a trained pack that calls images unknown whose energy is below a threshold."""
    domain = trained(BASE, seed=seed)
    domain.unknown = Unknown(Judgement("energy", 2.0, threshold, 0.95), {})
    domain.save(path)


def library(folder: Path, count: int = 3) -> Path:
    """A folder of packs d0, d1, …; d`i` has i + 2 classes."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        pack(folder / f"d{i}.safetensors", classes=i + 2, seed=i)
    return folder


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    """A small image file."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), kind)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def bomb(width, height):
    """A PNG of a few kB that says it has width × height pixels."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = zlib.compress(bytes(1 + 3 * width) * min(height, 100))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def make_app(folder: Path, **options):
    options = {"window": 0.0, "log_requests": False} | options
    return create_app(Settings(library=folder, **options), BASE)


def expected(path: Path, images: list[bytes]) -> torch.Tensor:
    """The probabilities that the library's own classifier gives."""
    import polymask as pm
    from polymask.train.predict import Classifier

    return Classifier(BASE, pm.load_domain(path, BASE))(images)


@contextmanager
def running(app):
    """The app on a free port of this machine, in a thread."""
    config = uvicorn.Config(app, http=ImpatientProtocol, ws="none", lifespan="on", log_config=None, port=0)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield server, listening.getsockname()
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive()
