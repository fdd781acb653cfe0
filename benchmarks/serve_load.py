"""Load on `polymask serve`, on this machine alone, beside the plain PyTorch forward.

python benchmarks/serve_load.py --seconds 600 --out results/serve-load.json

1. One warm domain: images a second through HTTP, as a share of what the bare network does with
   the same batches that are in memory already.
2. A thousand domains, requests spread by Zipf(1.0), a cache of 50 networks: images a second, times,
   hit rate, memory.
3. The same requests by loading each domain's full checkpoint, without a cache and with one of 50.

The server, its clients and the yardsticks share the machine's cores.
"""

import argparse
import collections
import http.client
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import polymask as pm
from polymask.merged_cache import MergedCache
from polymask.predict import logits, network
from polymask.surgery import structural_copy

BASE, CLASSES, WARM = "efficientnet-lite0", 20, 50
CHECKPOINTS = 50  # files; domain i uses i % 50, so the disk is not what is measured


def main() -> None:
    options = read_options()
    base = pm.load_base(BASE)
    found: dict = {"base": BASE, "command": " ".join(["python", *sys.argv]), **environment()}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library"
        domain, cost = make_library(base, library, options.domains)
        found["pack_bytes"] = (library / "d0000.safetensors").stat().st_size
        found["merged_bytes"] = cost
        seconds = min(options.seconds, 60)
        before = bare_forward(base, domain, options, seconds / 4)
        single = single_domain(library, options, seconds)
        after = bare_forward(base, domain, options, seconds / 4)
        single["bare_images_per_second"] = (before + after) / 2
        single["share_of_bare"] = single["images_per_second"] / single["bare_images_per_second"]
        found["single_warm_domain"] = single
        show("one warm domain", single)
        many = many_domains(library, options, WARM * cost)
        found["many_domains"] = many
        show(f"{options.domains} domains, Zipf(1.0)", many)
        full = full_checkpoints(base, domain, Path(folder), options)
        for name, one in full.items():
            one["factor"] = many["images_per_second"] / one["images_per_second"]
            show(f"full checkpoints, {name}", one)
        found["full_checkpoints"] = full
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="of the Zipf load")
    parser.add_argument("--domains", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="images of a request, one domain")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--image-side", type=int, default=256, help="of the JPEGs that are sent")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def environment() -> dict:
    return {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }


def make_library(base: pm.Base, folder: Path, count: int) -> tuple[pm.Domain, int]:
    """Packs d0000, d0001, …; one of the domains, and the bytes of its merged network."""
    folder.mkdir()
    torch.manual_seed(0)
    names = [f"class {i}" for i in range(CLASSES)]
    domain = pm.new_domain(base, "affine-full", names)
    with torch.no_grad():  # a mask of ones would be stored in no space, and merged in no time
        for parameter in domain.transforms.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.01 * torch.randn_like(parameter) - 0.001)
    first = folder / "d0000.safetensors"
    domain.save(first)
    for i in range(1, count):
        shutil.copyfile(first, folder / f"d{i:04}.safetensors")
    domain = pm.load_domain(first, base)
    cache = MergedCache(base, 1 << 40)
    cache.network("one", domain)
    return domain, cache.stats.bytes


def bare_forward(base: pm.Base, domain: pm.Domain, options, seconds: float) -> float:
    """Images a second of the merged network, on batches in memory, with every core."""
    net = network(base, domain)
    images = torch.randn(options.batch, *base.input.shape)
    for _ in range(3):
        logits(net, images)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        logits(net, images)
        count += len(images)
    return count / (time.perf_counter() - began)


def single_domain(library: Path, options, seconds: float) -> dict:
    body = form("d0000", options.batch, options.image_side)
    flags = ["--max-batch", str(options.batch), "--workers", str(options.workers)]
    with Server(library, *flags) as server:
        server.load([body], [0] * 8, options.clients, 0)
        times, _, elapsed = server.load([body], None, options.clients, seconds)
        resident = server.resident()
    return {
        "batch": options.batch,
        "clients": options.clients,
        "images_per_second": options.batch * len(times) / elapsed,
        **percentiles(times),
        "resident_mb": resident,
    }


def many_domains(library: Path, options, budget: int) -> dict:
    """Requests of one image each, domains drawn by Zipf(1.0)."""
    bodies = [form(f"d{i:04}", 1, options.image_side) for i in range(options.domains)]
    clients = 2 * options.clients
    with Server(library, "--cache-bytes", str(budget), "--workers", str(options.workers)) as server:
        server.load(bodies, list(zipf(options.domains, 200, seed=9)), clients, 0)
        before = server.counts()
        memory = Memory(server)
        times, refused, elapsed = server.load(bodies, None, clients, options.seconds)
        samples = memory.stop()
        after = server.counts()
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    return {
        "seconds": elapsed,
        "clients": clients,
        "cache_networks": WARM,
        "requests": len(times),
        "refused": refused,
        "images_per_second": len(times) / elapsed,
        **percentiles(times),
        "hit_rate": hits / (hits + misses),
        "merges": misses,
        **flatness(samples),
    }


def full_checkpoints(base: pm.Base, domain: pm.Domain, folder: Path, options) -> dict:
    """The same requests, each domain a whole network in a file; images are in memory already."""
    whole = network(base, domain)
    state = {name: tensor.contiguous().clone() for name, tensor in whole.state_dict().items()}
    for i in range(CHECKPOINTS):
        save_file(state, folder / f"full-{i}.safetensors")
    image = torch.randn(1, *base.input.shape)
    found = {}
    for name, kept in (("loaded for each request", 0), (f"the last {WARM} kept", WARM)):
        nets: collections.OrderedDict = collections.OrderedDict()
        seconds, count, began = min(options.seconds, 60), 0, time.perf_counter()
        for i in zipf(options.domains, 10**6, seed=1):
            net = nets.pop(i, None)
            if net is None:
                net = structural_copy(whole)
                tensors = load_file(folder / f"full-{i % CHECKPOINTS}.safetensors")
                net.load_state_dict({n: t.clone() for n, t in tensors.items()}, assign=True)
            logits(net, image)
            nets[i] = net
            while len(nets) > kept:
                nets.popitem(last=False)
            count += 1
            if time.perf_counter() - began > seconds:
                break
        found[name] = {
            "images_per_second": count / (time.perf_counter() - began),
            "bytes_per_domain": sum(t.numel() * t.element_size() for t in state.values()),
        }
    return found


class Server:
    """`polymask serve` on a free port, with clients."""

    def __init__(self, library: Path, *flags: str) -> None:
        self.log = library.with_name("log")
        command = [sys.executable, "-m", "polymask", "serve", str(library), "--port", "0"]
        command += ["--no-request-log", "--timeout", "120", "--base", BASE, *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)

    def __enter__(self) -> "Server":
        while True:
            time.sleep(0.2)
            text = self.log.read_text()
            if self.process.poll() is not None:
                raise SystemExit(text)
            if found := re.search(r":(\d+)\s*$", text):
                self.port = int(found[1])
                try:
                    self.get("/readyz")
                    return self
                except OSError:
                    continue

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def get(self, target: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", target)
        return connection.getresponse().read().decode()

    def counts(self) -> dict[str, float]:
        text = self.get("/metrics")
        return {
            name: float(re.search(rf"^polymask_cache_{name}_total (\S+)", text, re.M)[1])
            for name in ("hits", "misses")
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

    def load(self, bodies, order, clients: int, seconds: float):
        """Send bodies in an order, or by Zipf for so long: times in seconds, refusals, elapsed."""
        times, refused, failed = [], [], []
        lock, until = threading.Lock(), time.perf_counter() + seconds
        queue = collections.deque(order) if order is not None else None

        def client(seed: int) -> None:
            draws = zipf(len(bodies), 10**7, seed=100 + seed)
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            mine = []
            while True:
                if queue is None:
                    if time.perf_counter() > until:
                        break
                    place = next(draws)
                else:
                    try:
                        place = queue.popleft()
                    except IndexError:
                        break
                began = time.perf_counter()
                connection.request("POST", "/v1/predict", bodies[place], FORM)
                reply = connection.getresponse()
                content = reply.read()
                if reply.status == 200:
                    mine.append(time.perf_counter() - began)
                elif reply.status in (429, 503):
                    refused.append(1)
                    time.sleep(float(reply.headers["Retry-After"]))
                else:
                    failed.append((reply.status, content[:200]))
                    break
            with lock:
                times.extend(mine)

        began = time.perf_counter()
        threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise SystemExit(f"the server answered {failed[0]}")
        return times, len(refused), time.perf_counter() - began


class Memory:
    """The server's megabytes, once a second."""

    def __init__(self, server: Server) -> None:
        self.samples: list[float] = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, args=(server,))
        self.thread.start()

    def _watch(self, server: Server) -> None:
        while not self.done.wait(1):
            self.samples.append(server.resident())

    def stop(self) -> list[float]:
        self.done.set()
        self.thread.join()
        return self.samples


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


def zipf(count: int, draws: int, seed: int):
    """Places 0 … count - 1; place r with a share of 1 / (r + 1)."""
    shares = 1 / np.arange(1, count + 1)
    random = np.random.default_rng(seed)
    for _ in range(0, draws, 1000):
        yield from random.choice(count, min(draws, 1000), p=shares / shares.sum()).tolist()


def percentiles(times: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50_ms": 1000 * float(p50), "p99_ms": 1000 * float(p99)}


def flatness(samples: list[float]) -> dict[str, float]:
    """How memory went, once the cache was full: the second half against the first."""
    if len(samples) < 4:
        return {}
    half = len(samples) // 2
    slope = np.polyfit(np.arange(len(samples) - half) / 60, samples[half:], 1)[0]
    return {
        "resident_mb_first_half": float(np.mean(samples[:half])),
        "resident_mb_second_half": float(np.mean(samples[half:])),
        "resident_mb_most": float(np.max(samples)),
        "resident_mb_per_minute_at_the_end": float(slope),
    }


def show(title: str, found: dict) -> None:
    print(title)
    for name, value in found.items():
        print(f"  {name.replace('_', ' '):34} {value:,.3f}".rstrip("0").rstrip("."))


if __name__ == "__main__":
    main()
