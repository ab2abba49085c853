"""The panels of figures 12 and 14: which load is served on which axis."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from experiments.serving.latency_vs_rate import settings
from experiments.serving.latency_vs_rate.runs import Setting

type Kind = Literal["plain", "samples", "beams"]


class Panel(NamedTuple):
    """One drawing.

    Attributes:
      server: a key of `settings.SERVERS`.
      data: a key of `settings.DATA`.
      axis: requests a second at which it ends.
      kind: what a request asks for.
      width: sequences of each.
    """

    server: str
    data: str
    axis: float
    kind: Kind = "plain"
    width: int = 1

    @property
    def title(self) -> str:
        """Model, data, and what is asked for."""
        asked = {
            "plain": "",
            "samples": f", {self.width} samples",
            "beams": f", beam width {self.width}",
        }[self.kind]
        return f"OPT-{self.server}, {self.data}{asked}"

    @property
    def hours(self) -> float:
        """Of load that is served: of Alpaca's short requests a quarter is plenty."""
        hours = settings.SERVERS[self.server].hours
        return hours if self.data == "ShareGPT" else min(hours, 0.25)

    @property
    def systems(self) -> tuple[settings.System, ...]:
        """Who is drawn: figure 14 leaves FasterTransformer out."""
        return settings.SYSTEMS[self.kind != "plain" :]

    def setting(self) -> Setting:
        """What is served.

        Beams are counted as that many samples in a pool that is longer by what beams
        share beyond the prompt: from beam to beam they live on, and die, in steps that
        the simulation does not take.
        """
        spared = 1.0
        if self.kind == "beams":
            found = savings(self.width)
            spared = (1 - found.samples) / (1 - found.beams)
        server = settings.SERVERS[self.server]
        return Setting(server, settings.DATA[self.data], self.width, spared)


class Savings(NamedTuple):
    """Shares of pages saved by requests of several sequences, short prompts.

    Attributes:
      samples: of one prompt.
      beams: of one search.
    """

    samples: float
    beams: float


def savings(width: int) -> Savings:
    """Looks up what `sharing` measured when the engine served such requests.

    Raises:
      ValueError: nobody measured that width.
    """
    path = Path(__file__).parents[2] / "records" / "sharing" / "result.npz"
    # As an array file, since its experiment would import the engine and a model.
    with np.load(path) as found:

        def saved(table: str) -> float:
            here = found[f"{table}.lengths"] == "short"
            here &= found[f"{table}.num_sequences"] == width
            if not here.any():
                raise ValueError(f"{path}: has no requests of {width} sequences")
            pages = found[f"{table}.distinct_pages"][here].sum()
            return float(1 - pages / found[f"{table}.logical_pages"][here].sum())

        return Savings(saved("samples"), saved("beams"))


_SEVERAL: tuple[Kind, ...] = ("samples", "beams")

PANELS: Mapping[str, Panel] = {
    **{
        f"12{letter}": Panel(server, data, settings.SERVERS[server].axis[data])
        for letter, (data, server) in zip(
            "abcdef",
            [(data, server) for data in settings.DATA for server in settings.SERVERS],
            strict=True,
        )
    },
    **{
        f"14{letter}": Panel("13B", "Alpaca", axis, kind, width)
        for letter, (kind, width, axis) in zip(
            "abcdef",
            [
                (kind, width, axis)
                for kind in _SEVERAL
                for width, axis in ((2, 15.0), (4, 10.0), (6, 6.0))
            ],
            strict=True,
        )
    },
}
"""By the names that the paper gives them."""
