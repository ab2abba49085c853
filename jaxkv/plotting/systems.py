"""Colour, marker and hatch of every system, equal in all figures.

Colours are those of Okabe and Ito without yellow, which is too light for lines on
white. Two systems of one colour never share a panel, and systems in a common panel
differ in marker and hatch.
"""

from typing import Any, NamedTuple

BLACK = 0
ORANGE = 1
SKY = 2
GREEN = 3
BLUE = 5
RED = 6
PURPLE = 7
"""Indices of the colours in `style.colors()`."""
GREY_INDEX = 8
"""Index of the grey of published numbers and of peers without a colour."""


class SystemStyle(NamedTuple):
    """Style of a system.

    Attributes:
      color: RGB in [0, 1].
      marker: matplotlib marker of points.
      hatch: matplotlib hatch of bars, which distinguishes systems without colour.
    """

    color: tuple[float, float, float]
    marker: str
    hatch: str

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of a line with points."""
        return {"color": self.color, "marker": self.marker}

    @property
    def bar(self) -> dict[str, Any]:
        """Keywords of a bar."""
        return {"color": self.color, "hatch": self.hatch, "edgecolor": "white"}


SYSTEM_STYLES: dict[str, tuple[int, str, str]] = {
    "published": (GREY_INDEX, "D", ""),
    # Benchmarked programs.
    "jaxkv": (BLUE, "o", ""),
    "jaxkv, first call": (BLUE, "d", "//"),
    "one run": (BLUE, "d", "//"),
    "all mapped": (BLUE, "o", ""),
    "PyTorch": (RED, "s", "\\\\"),
    "PyTorch, compiled": (PURPLE, "D", "xx"),
    "transformers": (ORANGE, "^", "//"),
    "llama.cpp": (GREY_INDEX, "v", ".."),
    "plain Python": (GREY_INDEX, "v", ".."),
    # Serving systems and policies.
    "FasterTransformer": (BLACK, "v", "xx"),
    "Orca (Max)": (RED, "s", "\\\\"),
    "Orca (Pow2)": (ORANGE, "d", "//"),
    "Orca (Oracle)": (SKY, "^", ".."),
    "paged": (BLUE, "o", ""),
    "Orca": (ORANGE, "s", "//"),
    "vLLM": (RED, "^", "\\\\"),
    "Sarathi (512)": (BLUE, "o", ""),
    "Sarathi (2,048)": (GREEN, "v", ".."),
    "static": (RED, "s", "\\\\"),
    "continuous": (GREEN, "^", "//"),
    "continuous, paged": (BLUE, "o", ""),
    # Placement of prefill and decode.
    "both phases": (RED, "s", "\\\\"),
    "split": (BLUE, "o", ""),
    "prefill only": (ORANGE, "^", "//"),
    "decode only": (GREEN, "v", ".."),
    # Policies by search.
    "CMA-ES": (BLUE, "o", ""),
    "random search": (GREY_INDEX, "v", ".."),
    "best shipped": (ORANGE, "s", "//"),
    "oracle of the remaining job": (GREEN, "^", ""),
    # Preemption.
    "room for all": (GREY_INDEX, "D", ""),
    "recompute": (RED, "s", "\\\\"),
    "recompute, hold new": (ORANGE, "d", "//"),
    "swap": (BLUE, "o", ""),
    "swap, hold new": (GREEN, "^", ".."),
    "latest": (RED, "s", "\\\\"),
    "least computed": (BLUE, "o", ""),
    "fewest pages": (GREEN, "^", ".."),
    "cheapest": (ORANGE, "d", "//"),
    # Orders of the requests of agent jobs.
    "shortest request": (ORANGE, "^", "//"),
    "oldest job": (RED, "s", "\\\\"),
    "least attained job": (GREEN, "v", ".."),
    "shortest remaining job": (BLUE, "o", ""),
    # Request orders for a prefix cache.
    "depth first": (GREEN, "^", ".."),
    "most cached first": (RED, "s", "\\\\"),
    "in order of arrival": (BLUE, "o", ""),
    # Attention.
    "plain": (RED, "s", "\\\\"),
    "in tiles": (GREEN, "^", ".."),
    "without the cache": (RED, "s", "\\\\"),
    "with the cache": (BLUE, "o", ""),
    # Drafters and sampling.
    "n-gram": (BLUE, "o", ""),
    "Jacobi": (GREEN, "s", ".."),
    "lookahead": (PURPLE, "D", "xx"),
    "early exit, 1 layer": (RED, "^", "\\\\"),
    "early exit, 2 layers": (BLACK, "v", "//"),
    "Medusa": (ORANGE, "v", "//"),
    "EAGLE": (SKY, "P", "||"),
    "draft model": (BLACK, "X", "xx"),
    "greedy": (BLUE, "o", ""),
    "temperature 1": (RED, "s", "\\\\"),
    "sampled": (RED, "s", "\\\\"),
    "mixed": (ORANGE, "^", "//"),
    # Kinds of parallelism.
    "one device": (BLACK, "v", "xx"),
    "data": (ORANGE, "^", "//"),
    "tensor": (SKY, "s", ".."),
    "vocabulary": (GREEN, "v", ""),
    "sequence": (PURPLE, "D", "xx"),
    "ulysses": (BLUE, "o", ""),
    "ring": (RED, "P", "\\\\"),
    "ring and ulysses": (PURPLE, "D", "xx"),
    "expert parallel, gather": (ORANGE, "^", "//"),
    "expert parallel, capacity": (GREEN, "v", ""),
    # Models and trainings.
    "dense": (RED, "s", "\\\\"),
    "mixture": (BLUE, "o", ""),
    "with balancing": (BLUE, "o", ""),
    "without balancing": (RED, "s", "\\\\"),
    "MHA": (RED, "s", "\\\\"),
    "GQA": (ORANGE, "^", "//"),
    "MQA": (GREEN, "v", ".."),
    "MLA": (BLUE, "o", ""),
    "balanced by loss": (RED, "s", "\\\\"),
    "balanced by bias": (BLUE, "o", ""),
    "DeepSeek": (BLUE, "o", ""),
    "DeepSeek, with drafts": (GREEN, "^", ".."),
    "transformer": (BLACK, "o", ""),
    "lstm": (RED, "s", "\\\\"),
    "sgd": (BLUE, "^", "//"),
    "1 layer": (GREEN, "v", ".."),
    "4 layers": (ORANGE, "D", "xx"),
    "6 layers": (PURPLE, "P", "||"),
    "learned positions": (SKY, "X", "--"),
    # Data sets.
    "ShareGPT": (RED, "s", "\\\\"),
    "Alpaca": (BLUE, "o", ""),
}
"""Colour, marker and hatch by system."""


def colors() -> tuple[tuple[float, float, float], ...]:
    """Returns the eight colours of Okabe and Ito, black first, as RGB in [0, 1].

    Source: Okabe & Ito 2008, "Color Universal Design", figure 16.
    """
    import matplotlib
    from matplotlib.colors import to_rgb

    return tuple(to_rgb(color) for color in matplotlib.color_sequences["okabe_ito"])


def system_style(name: str) -> SystemStyle:
    """Returns the style of a system; black with circles for unknown systems."""
    color, marker, hatch = SYSTEM_STYLES.get(name, (BLACK, "o", ""))
    return SystemStyle((*colors(), (0.5, 0.5, 0.5))[color], marker, hatch)
