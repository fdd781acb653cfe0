"""What a client waits for while others attack the server: latency, errors and memory, attack by attack.

    python benchmarks/under_attack.py --out results/under-attack.json    # about three minutes

One honest client asks for a prediction of one small photograph every tenth of a second. Beside it, one attack after
another, each from several connections that send as fast as they are answered: lists of a million wrong elements, images
that decode slowly or to very many pixels, bodies that are announced and never sent. The goals: no honest answer more
than a second later than the slowest one without an attack, no more than 200 MB more memory (server and decoders
together) for each connection that attacks, no status 500. Memory is what is resident, with pages of libraries counted
for every process.
"""

import argparse
import http.client
import io
import json
import os
import socket
import statistics
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from load.requests import FORM, form
from load.server import Server
from PIL import Image

import polymask as pm

JSON = {"Content-Type": "application/json"}
CONNECTIONS = 4  # of an attack
CALM = 3  # seconds after an attack, for the server to notice that those who attacked have gone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write what is measured")
    parser.add_argument("--seconds", type=float, default=20, help="of each attack")
    parser.add_argument("--only", help="the attacks whose names have this in them")
    options = parser.parse_args()
    attacks = {name: attack for name, attack in ATTACKS.items() if (options.only or "") in name}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library"
        write_library(library)
        with Server(library) as server:
            honest = form("d0", 1, 96)
            ask(server.port, honest, FORM)
            found = {name: measure(server, honest, attack, options.seconds) for name, attack in attacks.items()}
    result = {"cores": os.cpu_count(), "connections": CONNECTIONS, "seconds": options.seconds, "attacks": found}
    text = json.dumps(result, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


def write_library(folder: Path) -> None:
    base = pm.load_base("efficientnet-lite0")
    domain = pm.new_domain(base, "affine-full", ["a", "b"])
    domain.input = pm.InputSpec((3, 96, 96), base.input.mean, base.input.std)
    domain.save(folder / "d0.safetensors")


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = zlib.compress(bytes((1 + 3 * width) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def files(data: bytes, count: int) -> bytes:
    """A form with the same file several times."""
    parts = [b'--load\r\nContent-Disposition: form-data; name="domain"\r\n\r\nd0']
    head = b'--load\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\n'
    return b"\r\n".join([*parts, *[head + data] * count, b"--load--", b""])


def slow_bitmap() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((2200, 3300, 3), np.uint8)).save(buffer, "BMP")
    return buffer.getvalue()


def announce(port: int) -> int:
    """Say that 32 MiB will come, and let them not come."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 33554432\r\n\r\n{"
        )
        time.sleep(1)
    return 0


ATTACKS: dict[str, Callable[[int], int] | tuple[Callable[[], bytes], dict[str, str]] | None] = {
    "none": None,
    "a list of a million numbers": (lambda: b'{"domain":"d0","images":[' + b"1," * 1_000_000 + b"1]}", JSON),
    "32 PNG files of 25 million pixels": (lambda: files(png(5000, 5000), 32), FORM),
    "32 PNG files of 4 million pixels": (lambda: files(png(2000, 2000), 32), FORM),
    "a PNG of 1 × 25 million pixels": (lambda: files(png(1, 25_000_000), 1), FORM),
    "a BMP of 22 MB": (lambda: files(slow_bitmap(), 1), FORM),
    "bodies that never come": announce,
    "none again": None,
}


def measure(server: Server, honest: bytes, attack: object, seconds: float) -> dict[str, object]:
    """Latencies of the honest client, and what the server took, while an attack goes on."""
    over = threading.Event()
    statuses: list[int] = []
    if isinstance(attack, tuple):
        body, headers = attack[0](), attack[1]
        send: Callable[[int], int] | None = lambda port: ask(port, body, headers, seconds)  # noqa: E731
    else:
        send = attack  # type: ignore[assignment]

    def go_on() -> None:
        while not over.is_set():
            statuses.append(send(server.port))  # type: ignore[misc]

    before = memory(server)
    attackers = [threading.Thread(target=go_on) for _ in range(CONNECTIONS if send else 0)]
    for attacker in attackers:
        attacker.start()
    waits, bad, largest = [], 0, before
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        bad += ask(server.port, honest, FORM) != 200
        waits.append(1000 * (time.monotonic() - began))
        largest = max(largest, memory(server))
        time.sleep(0.1)
    over.set()
    for attacker in attackers:
        attacker.join()
    time.sleep(CALM)
    return {
        "honest_requests": len(waits),
        "refused": bad,
        "p50_ms": round(statistics.median(waits), 1),
        "max_ms": round(max(waits), 1),
        "attacks": len(statuses),
        "statuses": sorted(set(statuses) - {0}),
        "more_mb_each": round((largest - before) / 1e6 / max(1, len(attackers)), 1),
    }


def ask(port: int, body: bytes, headers: dict[str, str], patience: float = 120) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience)
    try:
        connection.request("POST", "/v1/predict", body, headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def memory(server: Server) -> int:
    """Bytes that the server and its decoders have in memory."""
    pids = [server.process.pid]
    for pid in pids:
        try:
            tasks = Path(f"/proc/{pid}/task").iterdir()
            pids += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total


if __name__ == "__main__":
    main()
