"""How do memory and communication grow with a sequence that several devices divide?

The gradient of a training step of one long sequence, by Ulysses, by a ring, by both and
by one device, compiled from shapes alone for devices that a CPU plays: what a device
keeps at once, and what it sends for attention. Of two layers of the model: the rest
does not depend on the sequence.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from experiments.framework import (
    Floats,
    Ints,
    Measurement,
    ResultRecord,
    ResultTable,
    Texts,
    claims_file,
    column,
    measured,
)
from experiments.harness import sharded_steps
from experiments.plotting import style
from jaxkv import validation
from jaxkv.models import ModelConfig
from jaxkv.progress import QUIET, Progress
from scaling.costs import parallelism
from scaling.training import meshes

CLAIMS = claims_file(__file__)
PANELS = (1, 2)
ONE_DEVICE = "one device"
"""The name of the way that divides nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model's layers, sequences, and ways to divide them."""

    hidden_size: int = 1024
    num_q_heads: int = 16
    num_kv_heads: int = 8
    mlp_size: int = 2816
    vocab_size: int = 257
    """Bytes: that the logits' memory does not hide the rest."""
    num_layers: int = 2
    sequences: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Tokens, ascending."""
    layouts: tuple[str, ...] = ("", "ulysses=8", "ring=8", "ring=4,ulysses=2")
    """As `jaxkv cost` takes them; of one sequence, so without dp."""

    def __post_init__(self) -> None:
        """Refuses what does not divide."""
        validation.ascending(self, "sequences", low=2)
        if not self.layouts:
            raise ValueError(f"layouts={self.layouts!r} must be 1 or more")
        for words in self.layouts:
            layout = parallelism.parse(words)
            if layout.data > 1:
                raise ValueError(f"{words} divides batches, and there is one sequence")
            for sequence in self.sequences:
                meshes.check(self.shape, layout, sequence_length=sequence)

    @property
    def mesh_devices(self) -> int:
        """As many as a layout asks for at most; a CPU is to count as so many."""
        return max(parallelism.parse(words).num_devices for words in self.layouts)

    @property
    def shape(self) -> ModelConfig:
        """The model."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_q_heads,
            mlp_size=self.mlp_size,
            max_positions=max(self.sequences),
        )


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        **{"hidden_size": 32, "num_q_heads": 4, "num_kv_heads": 2, "mlp_size": 48},
        **{"num_layers": 1, "sequences": (64, 128), "layouts": ("", "ulysses=2")},
    ),
}


class SequenceLayouts(ResultTable):
    """Sequences and ways to divide them, a row each; all of one device."""

    layout: Texts = column("as `jaxkv cost` takes it, or one device")
    sequence: Ints = column("tokens", form="{:,}")
    kept_bytes: Floats = column(
        "that it keeps at once beside parameters and gradients", heading="kept"
    )
    attention_bytes: Floats = column(
        "that it sends for attention, by the formulas", heading="for attention"
    )
    sent_bytes: Floats = column("that it sends in all, by the formulas", heading="sent")
    found_bytes: Floats = column("by the programs' collectives", heading="found")


class Result(ResultRecord):
    """What was counted."""

    ways: SequenceLayouts = column(
        "a row for each sequence and layout",
        heading="a device's part of a training step of one sequence",
        note="Kept: by XLA's plan of the program's memory. What is sent beside "
        "attention are gradients of weights, whatever the sequence.",
        prefix="",
    )


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Compiles every layout for every sequence; ended early, those done."""
    jobs = [(words, size) for words in config.layouts for size in config.sequences]
    rows = []
    for words, size in progress.track(jobs, "programs", "compiling"):
        layout = parallelism.parse(words)
        found = sharded_steps.count_compiled(
            config.shape, layout, batch=1, sequence=size
        )
        sent = sharded_steps.predicted_traffic(
            config.shape, layout, batch=1, sequence=size
        )
        both = [(x.scheme, x.forward + x.backward) for x in sent]
        own = sum(x for scheme, x in both if scheme in ("ring", "ulysses"))
        total = sum(x for _, x in both)
        name = words or ONE_DEVICE
        rows.append((name, size, found.kept_bytes, own, total, found.sent_bytes))
    return Result(SequenceLayouts.of(rows))


@CLAIMS.judge
def claims(result: Result) -> Iterator[Measurement]:
    """Holds the formulas against the programs."""
    for row in result.ways.rows():
        words = {name: row[name] for name in ("layout", "sequence")}
        yield measured(
            "bytes", row["sent_bytes"], published=row["found_bytes"], **words
        )


def plot(axes: Any, result: Result) -> None:
    """Draws what a device keeps, and what it sends for attention, by tokens."""
    (kept, sent), ways = axes, result.ways
    for name in ways.distinct("layout"):
        selected = ways.where(layout=name)
        # The name under which a layout has its colour.
        system = " and ".join(x for x in ("ring", "ulysses") if x in name) or ONE_DEVICE
        style.draw_curve(
            kept, selected.sequence, selected.kept_bytes / 1e9, system, name
        )
        if selected.attention_bytes.any():
            size = selected.attention_bytes / 1e9
            style.draw_curve(sent, selected.sequence, size, system, name)
    log: Any = {"xscale": "log", "yscale": "log"}
    longest = ways.where(sequence=max(ways.distinct("sequence"), default=0))
    whole = longest.where(layout=ONE_DEVICE).kept_bytes
    divided = longest.at(longest.layout != ONE_DEVICE)
    titles = ["Memory kept by a device", "Sent by a device for attention"]
    if len(divided):
        if len(whole):
            most = whole[0] / divided.kept_bytes.min()
            titles[0] = (
                f"Dividing {longest.sequence[0]:,} tokens cuts a device's memory "
            )
            titles[0] += f"{most:.0f}-fold"
        size = divided.attention_bytes
        names = [divided.layout[size.argmin()], divided.layout[size.argmax()]]
        titles[1] = f"{names[0]} sends 1/{size.max() / size.min():.0f} of what "
        titles[1] += f"{names[1]} sends"
    x = "length of a sequence [1,024 tokens]"
    labels = ("kept by a device [GB]", "sent by a device [GB]")
    for ax, title, y in zip(axes, titles, labels, strict=True):
        style.set_labels(ax, title, x, y, **log)
        ax.set_xticks(shown := list(ways.distinct("sequence")))
        ax.set_xticks([], minor=True)
        ax.set_xticklabels([f"{num / 1024:g}" for num in shown])
        style.label_log_axis(ax.yaxis)
        ax.legend()
