"""The style of figures and what several of them draw."""

from experiments.plotting.boxes import Box as Box
from experiments.plotting.style import colors as colors
from experiments.plotting.style import plain_log as plain_log
from experiments.plotting.style import shades as shades

__all__ = [
    "Box",
    "boxes",
    "colors",
    "plain_log",
    "shades",
    "sheets",
    "style",
    "systems",
    "timelines",
]
