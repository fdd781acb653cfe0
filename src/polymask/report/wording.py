"""Numbers as a reader wants them."""

from collections.abc import Sequence


def bytes_text(count: float) -> str:
    """12345678 -> "12.3 MB"."""
    return _scaled(count, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B")


def bits_text(count: float) -> str:
    """12345678 -> "12.3 Mbit"."""
    return _scaled(count, (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)), "bit")


def count_text(count: int) -> str:
    """12345678 -> "12.3 million"; below a million, 123456 -> "123,456"."""
    return f"{count / 1e6:.1f} million" if count >= 1_000_000 else f"{count:,}"


def duration_text(seconds: float) -> str:
    """401.2 -> "6 min 41 s"; below ten seconds, 4.21 -> "4.2 s"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def share_text(part: float, whole: float) -> str:
    """The part in percent of the whole, with two digits that matter below ten percent."""
    percent = 100 * part / whole
    return f"{percent:.1f} %" if percent >= 1 else f"{percent:.2g} %"


def moved_text(share: float) -> str:
    """0.473 -> "47.3 %"; few digits where little moved: "0.003 %", and "< 0.001 %" below that."""
    percent = 100 * share
    if percent >= 1:
        return f"{percent:.1f} %"
    if 0 < percent < 0.001:
        return "< 0.001 %"
    return f"{percent:.1g} %" if percent < 0.1 else f"{percent:.2f} %"


def listed(words: Sequence[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def difference_text(points: float) -> str:
    """-0.42 -> "0.4 points below"; what rounds to nothing is "level with"."""
    if abs(points) < 0.05:
        return "level with"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"


def _scaled(count: float, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    for unit, size in units:
        # 999.6 kB would be printed as 1000 kB.
        if count >= 0.9995 * size:
            number = count / size
            return f"{number:.0f} {unit}" if number >= 99.95 else f"{number:#.3g} {unit}"
    return f"{count:.0f} {smallest}"
