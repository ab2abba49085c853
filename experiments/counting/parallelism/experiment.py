"""How much does each kind of parallelism send, store and compute per device?

The gradient of a training step is compiled from shapes for virtual CPU devices, with
every layout over equally many devices. Bytes of collectives, parameters and operations
of a device are compared with the formulas of `jaxkv cost`, which were derived before
the programs existed. All counts are linear in the number of layers, so programs of one
and two layers determine those of the whole model.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments import lab
from experiments.harness import count_compiled, predicted_traffic
from jaxkv.models import ModelConfig
from scaling import shapes
from scaling.costs import max_device_params, parse_layout, training_step_flops
from scaling.shapes import describe_config
from scaling.training import check_trainable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLAIMS = lab.claims_file(__file__)


class Config(lab.ConfigRecord):
    """A model, a batch, and parallel layouts."""

    model: str = "llama-2-7b"
    """Dense model of `scaling.shapes.published`."""
    batch: lab.PositiveInt = 8
    """Sequences over all devices."""
    sequence: Annotated[int, lab.Range(2, 128)] = 128
    """Tokens per sequence; at most one attention tile, because XLA counts a loop body
    once."""
    layouts: Annotated[tuple[str, ...], lab.Entries(1)] = (
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
    """Layouts in the syntax of `jaxkv cost`."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for words in self.layouts:
            layout = parse_layout(words)
            check_trainable(self.shape(1), layout, sequence_length=self.sequence)
            if self.batch % layout.data:
                raise ValueError(
                    f"batch={self.batch!r} must be a multiple of {words}'s dp"
                )

    @property
    def mesh_devices(self) -> int:
        """Number of virtual CPU devices: the largest number that a layout needs."""
        return max(parse_layout(words).num_devices for words in self.layouts)

    def shape(self, num_layers: int) -> ModelConfig:
        """Returns the config of the model with `num_layers` layers."""
        shape = shapes.describe(self.model)
        attention: Any = shape.attention
        return ModelConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=num_layers,
            num_q_heads=attention.num_q_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            mlp_size=shape.mlp_size,
            max_positions=4096,
            tie_embeddings=shape.tie_embeddings,
        )


CONFIGS = {
    "real": Config(),
    "smoke": Config(model="smollm2-135m", batch=2, layouts=("tp=3", "ring=2,dp=2")),
}


class LayoutCosts(lab.ResultTable):
    """Counts of one device, a row per layout."""

    layout: lab.Texts = lab.column("layout in the syntax of `jaxkv cost`")
    devices: lab.Ints = lab.column("devices of the mesh")
    params: lab.Floats = lab.column("parameters of a device, by the formula")
    params_given: lab.Floats = lab.column(
        "parameters in the programs", heading="in program"
    )
    sent_bytes: lab.Floats = lab.column("bytes sent in a step, by the formulas")
    found_bytes: lab.Floats = lab.column(
        "bytes of the collectives", heading="collectives"
    )
    flops: lab.Floats = lab.column("operations in a step, by the formula")
    flops_found: lab.Floats = lab.column("operations counted by XLA", heading="counted")

    @property
    @lab.computed_column(heading="counted / formula", form="{:.3f}")
    def flops_ratio(self) -> np.ndarray:
        """Operations that XLA counts, divided by those of the formula."""
        return self.flops_found / self.flops


class SentBytes(lab.ResultTable):
    """Bytes sent by kind of parallelism, according to the formulas."""

    layout: lab.Texts = lab.column("layout in the syntax of `jaxkv cost`")
    scheme: lab.Texts = lab.column("scheme of `traffic.Traffic`")
    forward_bytes: lab.Floats = lab.column(
        "bytes of the forward pass", heading="forward"
    )
    backward_bytes: lab.Floats = lab.column(
        "bytes of the backward pass", heading="backward"
    )


class Result(lab.ResultRecord):
    """Counts of all programs."""

    ways: LayoutCosts = lab.column(
        "a row per layout",
        heading="one device in a training step, {0.model}, {0.num_layers} layers",
        columns=(
            *("layout", "devices", "params", "params_given"),
            *("sent_bytes", "found_bytes", "flops_ratio"),
        ),
        note="Parameters and collectives of the program: extrapolated from programs of "
        "one and two layers.",
    )
    parts: SentBytes = lab.column(
        "bytes by kind of parallelism",
        heading="bytes sent by a device, by the formulas",
    )
    num_layers: int = lab.column("layers of the whole model", is_shown=False)
    model: str = lab.column("name of the model", is_shown=False)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Compiles every layout for one and two layers; a stopped run is partial."""
    num_layers = shapes.describe(config.model).num_layers
    rows = []
    parts = []
    for words in progress.track(config.layouts, "layouts", "compiling"):
        layout = parse_layout(words)
        sizes: Any = {"batch": config.batch, "sequence": config.sequence}
        one, two = (
            count_compiled(config.shape(num), layout, **sizes)[:3] for num in (1, 2)
        )
        full_counts = [
            a + (b - a) * (num_layers - 1) for a, b in zip(one, two, strict=True)
        ]
        model = config.shape(num_layers)
        shape = describe_config(model)
        sent = predicted_traffic(model, layout, **sizes)
        formulas = (
            float(sum(max_device_params(shape, layout))),
            sum(traffic.forward + traffic.backward for traffic in sent),
            training_step_flops(shape, **sizes).model / layout.num_devices,
        )
        pairs = [x for pair in zip(formulas, full_counts, strict=True) for x in pair]
        rows.append((words, layout.num_devices, *pairs))
        for scheme in dict.fromkeys(traffic.scheme for traffic in sent):
            selected = [traffic for traffic in sent if traffic.scheme == scheme]
            both = (
                sum(getattr(x, phase) for x in selected)
                for phase in ("forward", "backward")
            )
            parts.append((words, scheme, *both))
    return Result(LayoutCosts.of(rows), SentBytes.of(parts), num_layers, config.model)


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares the formulas with the programs."""
    for row in result.ways.rows():
        words = {"layout": row["layout"]}
        yield lab.measured(
            "bytes", row["sent_bytes"], published=row["found_bytes"], **words
        )
        yield lab.measured(
            "params", row["params"], published=row["params_given"], **words
        )
        yield lab.measured("flops", row["flops"], published=row["flops_found"], **words)


def plot(ax: "Axes", result: Result) -> None:
    """Draws the bytes a device sends: formulas by kind, and counts of the programs."""
    ways = result.ways
    parts = result.parts
    place = {name: number for number, name in enumerate(ways.layout)}
    left = np.zeros(len(place))
    for scheme in dict.fromkeys(parts.scheme.tolist()):
        scheme_parts = parts.where(scheme=scheme)
        rows = [place[name] for name in scheme_parts.layout]
        size = (scheme_parts.forward_bytes + scheme_parts.backward_bytes) / 1e9
        ax.barh(
            rows, size, 0.62, left[rows], label=scheme, **lab.system_style(scheme).bar
        )
        left[rows] += size
    sent_gb = ways.found_bytes / 1e9
    look = {"marker": "|", "markersize": 20, "linestyle": "", "markeredgewidth": 2}
    label = "counted in the compiled program"
    lab.draw_curve(ax, sent_gb, [*place.values()], 0, label, **look)
    for i, value in enumerate(sent_gb):
        lab.annotate(ax, f"{value:.1f}", (value, i), (6, 0), va="center_baseline")
    ax.set_yticks([*place.values()], [*place])
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.1)
    ax.set_xlim(left=0)
    ax.invert_yaxis()
    title = "Bytes sent by a device in a step"
    if len(sent_gb):
        names = ways.layout.tolist()
        min_name = names[int(sent_gb.argmin())]
        max_name = names[int(sent_gb.argmax())]
        title = f"{min_name} sends least, {sent_gb.min():.1f} GB a step; "
        title += f"{max_name} sends {sent_gb.max() / sent_gb.min():.0f} times as much"
    lab.set_labels(ax, title, "sent by a device in a step [GB]", "")
    ax.legend()


STUDY = lab.Study(CONFIGS, Result, run, plot, claims, panels=lab.Panels(1, 1, 4.2))
