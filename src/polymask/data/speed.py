"""How fast images come: `python -m polymask.data.speed SOURCE …` prints a line for each source."""

import sys
import time
from dataclasses import dataclass

from polymask.core.input import InputSpec
from polymask.data.cache import cache_domain
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.loader import Loader
from polymask.data.preprocess import eval_transform, train_transform


@dataclass(frozen=True)
class Speed:
    """Images a second: decoded into a cache, then given as training and as evaluation batches."""

    decode: float
    train: float
    evaluate: float


def measure_speed(data: DomainData, spec: InputSpec, *, workers: int | None = None, seconds: float = 2.0) -> Speed:
    """Decode the domain, then load batches of 32 for so many seconds each way."""
    images, begin = sum(map(len, data.splits().values())), time.perf_counter()
    cache = cache_domain(data, spec, workers=workers)
    decode = images / (time.perf_counter() - begin)
    train = Loader(cache.train, train_transform(data, spec), shuffle=True, workers=workers)
    evaluate = Loader(cache.val, eval_transform(data, spec), workers=workers)
    return Speed(decode, train.throughput(seconds), evaluate.throughput(seconds))


def main() -> None:
    """Measure the sources named on the command line, at 128 pixels."""
    spec = InputSpec((3, 128, 128), interpolation="bicubic")
    for source in sys.argv[1:] or ["digits", "letters", "solar-cells"]:
        speed = measure_speed(load_data(source), spec)
        print(
            f"{source}: decodes {speed.decode:.0f}, gives {speed.train:.0f} for training and "
            f"{speed.evaluate:.0f} for evaluation, images a second"
        )


if __name__ == "__main__":
    main()
