"""What does each way to divide a model over devices send, keep and compute?

The gradient of a training step, divided in every way over as many devices, compiled for
devices that a CPU plays, from shapes alone: what its collectives send, what a device
holds, what it computes. Beside it stand the formulas of `jaxkv cost`, which were
derived before there was a program. Programs of one layer and of two say what the whole
model sends, which is linear in the layers.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.framework import (
    Floats,
    Ints,
    Measurement,
    ReportPart,
    ResultRecord,
    ResultTable,
    Texts,
    claims_file,
    column,
    measured,
)
from experiments.framework.table import computed_column
from experiments.harness import sharded_steps
from experiments.plotting import style, systems
from jaxkv import validation
from jaxkv.models import ModelConfig
from jaxkv.progress import QUIET, Progress
from scaling.costs import flops, memory, parallelism
from scaling.shapes import from_model, published
from scaling.training import meshes

CLAIMS = claims_file(__file__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model, a batch, and ways to divide both."""

    model: str = "llama-2-7b"
    """One of `scaling.shapes.published`, dense."""
    batch: int = 8
    """Sequences, over all devices."""
    sequence: int = 128
    """Tokens of each; a tile of attention at most, as XLA counts the body of a loop
    once."""
    layouts: tuple[str, ...] = (
        "dp=8",
        "tp=8",
        "tp=8,sp",
        "ulysses=8",
        "ring=8",
        "tp=4,dp=2",
        "tp=4,sp,dp=2",
        "tp=2,ulysses=2,dp=2",
        "ring=4,ulysses=2",
    )
    """As `jaxkv cost` takes them."""

    def __post_init__(self) -> None:
        """Refuses what leaves nothing to divide, and layouts that are none."""
        validation.at_least(self, "batch")
        validation.within(self, "sequence", low=2, high=128)
        if not self.layouts:
            raise ValueError(f"layouts={self.layouts!r} must be 1 or more")
        for words in self.layouts:
            layout = parallelism.parse(words)
            meshes.check(self.shape(1), layout, sequence_length=self.sequence)
            if self.batch % layout.data:
                raise ValueError(
                    f"batch={self.batch!r} must be a multiple of {words}'s dp"
                )

    @property
    def mesh_devices(self) -> int:
        """As many as a layout asks for at most; a CPU is to count as so many."""
        return max(parallelism.parse(words).num_devices for words in self.layouts)

    def shape(self, num_layers: int) -> ModelConfig:
        """The model, of so many layers."""
        told = published.describe(self.model)
        attention: Any = told.attention
        return ModelConfig(
            vocab_size=told.vocab_size,
            hidden_size=told.hidden_size,
            num_layers=num_layers,
            num_q_heads=attention.num_q_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            mlp_size=told.mlp_size,
            max_positions=4096,
            tie_embeddings=told.tie_embeddings,
        )


PANEL_SIZE_INCHES = (6.8, 4.2)

CONFIGS = {
    "real": Config(),
    "smoke": Config(model="smollm2-135m", batch=2, layouts=("tp=3", "ring=2,dp=2")),
}


class LayoutCosts(ResultTable):
    """Ways to divide the model, a row each; all but the devices are of one device."""

    layout: Texts = column("as `jaxkv cost` takes it")
    devices: Ints = column("of the mesh")
    params: Floats = column("parameters that it has, by the formula")
    params_given: Floats = column("that the programs are given", heading="given")
    sent_bytes: Floats = column("that it sends in a step, by the formulas")
    found_bytes: Floats = column("by the programs' collectives", heading="found")
    flops: Floats = column("operations in a step, by the formula")
    flops_found: Floats = column("that XLA counts", heading="counted")

    @property
    @computed_column(heading="counted / formula", form="{:.3f}")
    def flops_ratio(self) -> np.ndarray:
        """Operations that XLA counts, over those of the formula."""
        return self.flops_found / self.flops


class SentBytes(ResultTable):
    """What is sent, kind by kind, by the formulas."""

    layout: Texts = column("as `jaxkv cost` takes it")
    scheme: Texts = column("of `traffic.Traffic`")
    forward_bytes: Floats = column("in the forward pass", heading="forward")
    backward_bytes: Floats = column("in the backward pass", heading="backward")


class Result(ResultRecord):
    """What was counted."""

    ways: LayoutCosts = column("a row for each layout")
    parts: SentBytes = column("what is sent")
    num_layers: int = column("of the whole model")
    model: str = column("whose shape it is")


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Compiles every layout for one layer and for two; ended early, those done."""
    num_layers = published.describe(config.model).num_layers
    rows, parts = [], []
    for words in progress.track(config.layouts, "layouts", "compiling"):
        layout = parallelism.parse(words)
        sizes: Any = {"batch": config.batch, "sequence": config.sequence}
        one, two = (
            sharded_steps.count_compiled(config.shape(num), layout, **sizes)[:3]
            for num in (1, 2)
        )
        whole = [a + (b - a) * (num_layers - 1) for a, b in zip(one, two, strict=True)]
        model = config.shape(num_layers)
        shape, sent = (
            from_model.describe(model),
            sharded_steps.predicted_traffic(model, layout, **sizes),
        )
        formulas = (
            float(sum(memory.most_held(shape, layout))),
            sum(each.forward + each.backward for each in sent),
            flops.training(shape, **sizes).model / layout.num_devices,
        )
        told = [x for pair in zip(formulas, whole, strict=True) for x in pair]
        rows.append((words, layout.num_devices, *told))
        for scheme in dict.fromkeys(each.scheme for each in sent):
            mine = [each for each in sent if each.scheme == scheme]
            both = (
                sum(getattr(x, way) for x in mine) for way in ("forward", "backward")
            )
            parts.append((words, scheme, *both))
    return Result(LayoutCosts.of(rows), SentBytes.of(parts), num_layers, config.model)


def summary(result: Result) -> list[ReportPart]:
    """Tables: what a device has, sends and computes; and what it sends for what."""
    what = f"{result.model}, {result.num_layers} layers"
    return [
        result.ways.sheet(
            f"a device's part of a training step, {what}",
            "layout",
            "devices",
            "params",
            "params_given",
            "sent_bytes",
            "found_bytes",
            "flops_ratio",
            note="Given and found: programs of one layer and of two, and the line "
            "through both.",
        ),
        result.parts.sheet(
            "what a device sends, by the formulas",
            "layout",
            "scheme",
            "forward_bytes",
            "backward_bytes",
        ),
    ]


@CLAIMS.judge
def claims(result: Result) -> Iterator[Measurement]:
    """Holds the formulas against the programs."""
    for row in result.ways.rows():
        words = {"layout": row["layout"]}
        yield measured(
            "bytes", row["sent_bytes"], published=row["found_bytes"], **words
        )
        yield measured("params", row["params"], published=row["params_given"], **words)
        yield measured("flops", row["flops"], published=row["flops_found"], **words)


def plot(ax: Any, result: Result) -> None:
    """Draws what a device sends: the formulas' parts, and what the programs say."""
    ways, parts = result.ways, result.parts
    place = {name: number for number, name in enumerate(ways.layout)}
    left = np.zeros(len(place))
    for scheme in dict.fromkeys(parts.scheme.tolist()):
        here = parts.where(scheme=scheme)
        rows = [place[name] for name in here.layout]
        size = (here.forward_bytes + here.backward_bytes) / 1e9
        look: Any = {"left": left[rows], "label": scheme} | systems.system_style(
            scheme
        ).bar
        ax.barh(rows, size, 0.62, **look)
        left[rows] += size
    found = ways.found_bytes / 1e9
    look = {"marker": "|", "markersize": 20, "linestyle": "", "markeredgewidth": 2}
    label = "counted in the compiled program"
    style.draw_curve(ax, found, [*place.values()], 0, label, **look)
    for i, value in enumerate(found):
        style.annotate(ax, f"{value:.1f}", (value, i), (6, 0), va="center_baseline")
    ax.set_yticks([*place.values()], [*place])
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.1)
    ax.set_xlim(left=0)
    ax.invert_yaxis()
    title = "What a device sends in a step"
    if len(found):
        names = ways.layout.tolist()
        least, most = names[int(found.argmin())], names[int(found.argmax())]
        title = f"{least} sends least, {found.min():.1f} GB a step; "
        title += f"{most} sends {found.max() / found.min():.0f} times as much"
    style.set_labels(ax, title, "sent by a device in a step [GB]", "")
    ax.legend()
