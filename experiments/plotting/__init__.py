"""Style of figures, and shared drawing functions."""

from experiments.plotting.boxes import Box as Box
from experiments.plotting.style import colors as colors
from experiments.plotting.style import label_log_axis as label_log_axis
from experiments.plotting.style import sequential_colors as sequential_colors

__all__ = [
    "Box",
    "boxes",
    "colors",
    "label_log_axis",
    "layout",
    "sequential_colors",
    "style",
    "systems",
    "timelines",
]
