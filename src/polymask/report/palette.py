"""The colours of reports, by role: one value on light paper, one on dark.

Series colours are Okabe and Ito's, which colour-blind readers can tell apart, made darker on
light paper and lighter on dark until text in them has a contrast of 4.5 : 1.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """A role and its two values; `light` is also what figures are drawn with."""

    role: str
    light: str
    dark: str


PAPER = Colour("paper", "#fdfdfc", "#15171a")
PANEL = Colour("panel", "#f4f4f1", "#1f2226")
INK = Colour("ink", "#1c1d1f", "#e9e8e4")
MUTED = Colour("muted", "#5f6368", "#a3a7ad")
LINE = Colour("line", "#dcdcd8", "#363a40")
ALARM = Colour("alarm", "#b3121d", "#ff8a80")
SERIES = (
    Colour("series-0", "#0067a5", "#5cb8f0"),  # blue
    Colour("series-1", "#b84d00", "#f5954a"),  # vermilion
    Colour("series-2", "#007a59", "#35c79b"),  # bluish green
    Colour("series-3", "#a03f76", "#e298c2"),  # reddish purple
    Colour("series-4", "#8a6400", "#e8b53a"),  # orange
    Colour("series-5", "#3d6f8e", "#9cc7e0"),  # sky blue
    Colour("series-6", "#6b6b1e", "#d8d160"),  # yellow
)
COLOURS = (PAPER, PANEL, INK, MUTED, LINE, ALARM, *SERIES)


def variables(theme: str) -> str:
    """CSS declarations of every role, for the theme "light" or "dark"."""
    return " ".join(f"--{colour.role}: {getattr(colour, theme)};" for colour in COLOURS)
