"""How the C library treats memory that is freed."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, for what it needs next; whether that worked.

    A training step takes and frees some hundred megabytes. By default glibc gives them back, and
    the kernel clears every page that is taken again. What has been taken once then stays taken.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def give_back_freed_memory() -> bool:
    """Give the system every page that is free; whether there were any.

    glibc keeps memory for each thread by itself, so what one thread frees another takes anew: a
    process whose threads make and drop networks grows and grows.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
