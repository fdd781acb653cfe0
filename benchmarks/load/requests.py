"""What the clients send: images in forms, for domains drawn by Zipf's law."""

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

FORM = {"Content-Type": "multipart/form-data; boundary=load"}


def form(domain: str, images: int, side: int) -> bytes:
    """A request with JPEGs of soft noise, which decode like photographs."""
    parts = [b'--load\r\nContent-Disposition: form-data; name="domain"\r\n\r\n' + domain.encode()]
    for i in range(images):
        noise = np.random.default_rng(i).integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG")
        head = f'--load\r\nContent-Disposition: form-data; name="images"; filename="{i}.jpg"\r\n'
        parts.append(head.encode() + b"Content-Type: image/jpeg\r\n\r\n" + buffer.getvalue())
    return b"\r\n".join([*parts, b"--load--", b""])


def zipf(count: int, seed: int) -> Iterator[int]:
    """An endless stream of ranks 0 … count - 1; rank r with a share proportional to 1 / (r + 1)."""
    shares = 1 / np.arange(1, count + 1)
    random = np.random.default_rng(seed)
    while True:
        yield from random.choice(count, 1000, p=shares / shares.sum()).tolist()
