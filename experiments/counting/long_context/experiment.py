"""How do memory and communication grow with a sequence that is sharded over devices?

The gradient of a training step of one long sequence is compiled from shapes for virtual
CPU devices: by Ulysses, by ring attention, by both, and on one device. Counted are the
peak memory of a device and the bytes it sends for attention. Two layers are enough,
because the traffic of weights does not depend on the sequence length.
"""

from collections.abc import Iterator
from typing import Annotated

import numpy as np

from experiments import lab
from experiments.harness import count_compiled, predicted_traffic
from jaxkv.models import ModelConfig
from scaling.costs import parse_layout
from scaling.training import check_trainable

CLAIMS = lab.claims_file(__file__)
ONE_DEVICE = "one device"
"""Name of the layout on a single device."""


Lengths = Annotated[tuple[int, ...], lab.Ascending(2)]


class Config(lab.ConfigRecord):
    """Layers of a model, sequence lengths, and parallel layouts."""

    hidden_size: int = 1024
    num_q_heads: int = 16
    num_kv_heads: int = 8
    mlp_size: int = 2816
    vocab_size: int = 257
    """Bytes: a small vocabulary, so that logits do not dominate memory."""
    num_layers: int = 2
    sequences: Lengths = (1024, 2048, 4096, 8192, 16384)
    """Sequence lengths in tokens, ascending."""
    layouts: Annotated[tuple[str, ...], lab.Entries(1)] = (
        "",
        "ulysses=8",
        "ring=8",
        "ring=4,ulysses=2",
    )
    """Layouts in the syntax of `jaxkv cost`; one sequence, so without dp."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for words in self.layouts:
            layout = parse_layout(words)
            if layout.data > 1:
                raise ValueError(f"layouts={words!r} must not have dp: one sequence")
            for sequence in self.sequences:
                check_trainable(self.shape, layout, sequence_length=sequence)

    @property
    def mesh_devices(self) -> int:
        """Number of virtual CPU devices: the largest number that a layout needs."""
        return max(parse_layout(words).num_devices for words in self.layouts)

    @property
    def shape(self) -> ModelConfig:
        """Config of the model."""
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


class SequenceLayouts(lab.ResultTable):
    """Counts of one device, a row per sequence length and layout."""

    layout: lab.Texts = lab.column(
        "layout in the syntax of `jaxkv cost`, or one device"
    )
    sequence: lab.Ints = lab.column("tokens of the sequence", form="{:,}")
    kept_bytes: lab.Floats = lab.column(
        "peak bytes without parameters and gradients", heading="memory"
    )
    attention_bytes: lab.Floats = lab.column(
        "bytes sent for attention, by the formulas", heading="for attention"
    )
    sent_bytes: lab.Floats = lab.column(
        "bytes sent in total, by the formulas", heading="sent"
    )
    found_bytes: lab.Floats = lab.column(
        "bytes of the collectives", heading="collectives"
    )


class Result(lab.ResultRecord):
    """Counts of all programs."""

    ways: SequenceLayouts = lab.column(
        "a row per sequence length and layout",
        heading="one device in a training step of one sequence",
        note="Memory: XLA's plan for the program. Traffic other than attention is "
        "that of weight gradients, for any sequence length.",
        prefix="",
    )


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Compiles every layout and sequence; a stopped run has the completed ones."""
    jobs = [(words, size) for words in config.layouts for size in config.sequences]
    rows = []
    for words, size in progress.track(jobs, "programs", "compiling"):
        layout = parse_layout(words)
        counts = count_compiled(config.shape, layout, batch=1, sequence=size)
        sent = predicted_traffic(config.shape, layout, batch=1, sequence=size)
        both = [(x.scheme, x.forward + x.backward) for x in sent]
        attention_bytes = sum(x for scheme, x in both if scheme in ("ring", "ulysses"))
        total = sum(x for _, x in both)
        name = words or ONE_DEVICE
        rows.append(
            (name, size, counts.kept_bytes, attention_bytes, total, counts.sent_bytes)
        )
    return Result(SequenceLayouts.of(rows))


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares the formulas with the programs."""
    for row in result.ways.rows():
        words = {name: row[name] for name in ("layout", "sequence")}
        yield lab.measured(
            "bytes", row["sent_bytes"], published=row["found_bytes"], **words
        )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the memory of a device, and the bytes it sends for attention, by tokens."""
    (memory_ax, sent), ways = axes, result.ways
    for name in ways.distinct("layout"):
        selected = ways.where(layout=name)
        # Name of the layout's colour.
        system = " and ".join(x for x in ("ring", "ulysses") if x in name) or ONE_DEVICE
        lab.draw_curve(
            memory_ax, selected.sequence, selected.kept_bytes / 1e9, system, name
        )
        if selected.attention_bytes.any():
            size = selected.attention_bytes / 1e9
            lab.draw_curve(sent, selected.sequence, size, system, name)
    longest = ways.where(sequence=max(ways.distinct("sequence"), default=0))
    single_bytes = longest.where(layout=ONE_DEVICE).kept_bytes
    divided = longest.at(longest.layout != ONE_DEVICE)
    titles = ["Activation memory of a device", "Bytes sent by a device for attention"]
    if len(divided):
        if len(single_bytes):
            ratio = single_bytes[0] / divided.kept_bytes.min()
            titles[0] = (
                f"Dividing {longest.sequence[0]:,} tokens cuts a device's memory "
            )
            titles[0] += f"{ratio:.0f}-fold"
        size = divided.attention_bytes
        names = [divided.layout[size.argmin()], divided.layout[size.argmax()]]
        titles[1] = f"{names[0]} sends 1/{size.max() / size.min():.0f} of the bytes "
        titles[1] += f"of {names[1]}"
    x = "length of a sequence [1,024 tokens]"
    labels = ("activation memory of a device [GB]", "sent by a device [GB]")
    for ax, title, y in zip(axes, titles, labels, strict=True):
        lab.set_labels(ax, title, x, y, xscale="log", yscale="log")
        ax.set_xticks(shown := list(ways.distinct("sequence")))
        ax.set_xticks([], minor=True)
        ax.set_xticklabels([f"{num / 1024:g}" for num in shown])
        lab.label_log_axis(ax.yaxis)
        ax.legend()


STUDY = lab.Study(CONFIGS, Result, run, plot, claims, panels=lab.Panels(1, 2))
