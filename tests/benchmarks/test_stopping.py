"""A driver that is asked to stop, or killed, leaves no process behind."""

import signal
import subprocess
import sys
import time

import pytest

from image_folders import make_folder
from polymask.benchmarks.local import sigterm_as_ctrl_c
from polymask.train.state import load_checkpoint

# More jobs than fit into the queue's pipe: a driver that waits until all were taken never ends.
SEEDS = 100
LONG = (
    "--methods bn-only --side 32 --epochs 9999 --batch-size 4 --workers 2 --threads 1 --out runs --seeds "
    + ",".join(map(str, range(SEEDS)))
)


def heed_ctrl_c():
    """What a shell starts in the background ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_sigterm_is_ctrl_c_for_a_while():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_workers_save_and_end_with_their_driver(name, tmp_path):
    psutil = pytest.importorskip("psutil")
    for domain in ("apples", "pears"):
        make_folder(tmp_path / "domains" / domain)
    driver = subprocess.Popen(
        [sys.executable, "-m", "polymask", "benchmark", "domains", *LONG.split()],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    workers = []
    try:
        deadline = time.monotonic() + 300
        while len(found := list(tmp_path.rglob("*.checkpoint"))) < 2:
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        workers = psutil.Process(driver.pid).children(recursive=True)
        assert len(workers) >= 2
        driver.send_signal(signal.Signals[name])
        _, said = driver.communicate(timeout=300)
        _, alive = psutil.wait_procs(workers, timeout=120)
        assert alive == []
    finally:
        if driver.poll() is None:
            driver.kill()
        for worker in workers:
            if worker.is_running():
                worker.kill()
    assert all(load_checkpoint(checkpoint) for checkpoint in found)
    if name != "SIGKILL":
        assert driver.returncode == 130
        assert f"stopped with 0 of {2 * SEEDS} jobs done" in said
