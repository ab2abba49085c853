"""Compares expert parallelism with tensor parallelism of a mixture of experts.

Tensor parallelism splits every expert over all devices, which then process all tokens.
Expert parallelism keeps experts whole and sends tokens to them. The bytes that each
layout sends in a training step are compared with the formulas of `jaxkv cost` and with
the compiled programs. Step times are measured on virtual CPU devices.

Expert parallelism waits for the device with the most tokens, and buffers of equal
capacity drop tokens that exceed it. Two mixtures are trained, with and without the
load-balancing loss. Their routing of held-out text shows the imbalance of experts and
devices, and the drops and traffic at each capacity.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from experiments import lab
from experiments.harness import collective_bytes, median_seconds, predicted_traffic
from jaxkv import models
from jaxkv.models import Experts, ModelConfig, Params, Routing, run_sequences
from jaxkv.parallel import dropped_fraction
from scaling.corpora import STANDARD_LIBRARY, VOCAB_SIZE, CorpusConfig, open_corpus
from scaling.costs import Layout, parse_layout
from scaling.training import (
    OptimizerConfig,
    StepConfig,
    TrainConfig,
    check_trainable,
    count_model_parameters,
    divided_gradient,
    gather_tree,
    make_training_mesh,
    place_training_tree,
    stream_windows,
    train_in_memory,
)
from scaling.training import transformer as make_transformer_config

BALANCE_WEIGHTS = {"with": 0.01, "without": 0.0}
"""Weights of the load-balancing loss."""


class Config(lab.ConfigRecord):
    """A mixture of experts, its training, and layouts."""

    width: int = 64
    num_layers: int = 2
    num_experts: int = 16
    top_k: int = 2
    size: int = 64
    """FFN width of an expert."""
    batch_size: int = 16
    """Windows of a step over all devices."""
    seq_len: int = 128
    num_steps: lab.PositiveInt = 600
    learning_rate: float = 1e-2
    corpus: CorpusConfig = STANDARD_LIBRARY
    devices: Annotated[tuple[int, ...], lab.Ascending(2)] = (2, 4, 8)
    """Degrees of tensor and of expert parallelism."""
    capacities: lab.AscendingFloats = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
    """Capacity factors: places of an expert over the even share, ascending."""
    sent_capacity: Annotated[float, lab.Range(0, ends="()")] = 1.25
    """Capacity factor of the layouts whose bytes and times are reported."""
    num_windows: int = 256
    """Held-out windows whose routing is measured."""
    rounds: lab.PositiveInt = 7
    """Timed steps of every layout, interleaved."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        num = max(self.devices)
        for name in ("batch_size", "num_windows"):
            if getattr(self, name) % num:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of {num} devices"
                )
        for words in self.layouts:
            check_trainable(
                self.model("with"),
                parse_layout(words),
                sequence_length=self.seq_len,
            )

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts of the mixture in the notation of `jaxkv cost`."""
        ways = "tp={}", "ep={},gather", "ep={},capacity=" + f"{self.sent_capacity:g}"
        return tuple(template.format(p) for template in ways for p in self.devices)

    @property
    def mesh_devices(self) -> int:
        """Number of virtual CPU devices."""
        return max(self.devices)

    def model(self, balancing: str) -> ModelConfig:
        """Returns the mixture, with or without the load-balancing loss."""
        mixed = Experts(
            num_experts=self.num_experts,
            top_k=self.top_k,
            size=self.size,
            balance_weight=BALANCE_WEIGHTS[balancing],
        )
        dense = make_transformer_config(
            self.width,
            num_heads=max(8, self.mesh_devices),
            num_layers=self.num_layers,
            mlp_size=self.size * self.top_k,
            vocab_size=VOCAB_SIZE,
            seq_len=self.seq_len,
        )
        return dataclasses.replace(dense, experts=mixed)

    def training(self, balancing: str) -> TrainConfig:
        """Returns the training config on one device."""
        return TrainConfig(
            model=self.model(balancing),
            corpus=self.corpus,
            optimizer=OptimizerConfig(kind="adamw"),
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            num_steps=self.num_steps,
            learning_rate=self.learning_rate,
            warmup_steps=self.num_steps // 10,
            cooldown_steps=self.num_steps // 5,
        )


CONFIGS = {
    "smoke": Config(
        **{"width": 16, "num_layers": 1, "num_experts": 4, "size": 8, "num_steps": 4},
        **{"batch_size": 4, "seq_len": 32, "devices": (2,), "num_windows": 8},
        **{"capacities": (0.5, 1.0, 2.0), "rounds": 1},
    ),
    "cpu": Config(),
}


class LayoutTable(lab.ResultTable):
    """Traffic, gradient error and step time of each layout."""

    layout: lab.Texts = lab.column("notation of `jaxkv cost`")
    devices: lab.Ints = lab.column("devices of the mesh")
    layers_bytes: lab.Floats = lab.column(
        "bytes that a device sends for activations, by formula", heading="activations"
    )
    sent_bytes: lab.Floats = lab.column("bytes that it sends in a step", heading="sent")
    found_bytes: lab.Floats = lab.column(
        "bytes of the program's collectives", heading="found"
    )
    error: lab.Floats = lab.column(
        "gradient error against one device, over the largest value of a parameter",
        form="{:.1e}",
    )
    step_s: lab.Floats = lab.column(
        "median time of a gradient", heading="time", form=lab.format_seconds
    )


class CapacityDrops(lab.ResultTable):
    """Effect of a capacity factor on held-out text, over all devices."""

    balancing: lab.Texts = lab.column(
        "with or without the loss", heading="balancing loss"
    )
    capacity: lab.Floats = lab.column("capacity factor", form="{:g}")
    dropped: lab.Floats = lab.column(
        "share of choices, mean over layers", form=lab.format_percent
    )
    loss: lab.Floats = lab.column("nats per token with drops", form="{:.3f}")
    sent_bytes: lab.Floats = lab.column(
        "to the experts and back, forward", heading="sent"
    )


class ExpertLoads(lab.ResultTable):
    """Load imbalance of experts, and of devices that hold a part of them."""

    balancing: lab.Texts = lab.column(
        "with or without the loss", heading="balancing loss"
    )
    layer: lab.Ints = lab.column("layer, from 1")
    devices: lab.Ints = lab.column("devices that share the experts")
    busiest: lab.Floats = lab.column("largest load of a device / mean", form="{:.2f}")
    busiest_expert: lab.Floats = lab.column(
        "largest load of an expert / mean", form="{:.2f}"
    )
    variation: lab.Floats = lab.column(
        "standard deviation of expert loads", form="{:.2f}"
    )
    idle: lab.Floats = lab.column(
        "share of experts without tokens", form=lab.format_percent
    )


class Result(lab.ResultRecord):
    """Traffic, drops, loads and losses."""

    ways: LayoutTable = lab.column("by layout")
    drops: CapacityDrops = lab.column("by capacity factor")
    loads: ExpertLoads = lab.column("by layer and number of devices")
    params: int = lab.column("parameters of a mixture")
    losses: np.ndarray = lab.column(
        "held-out nats per token without drops, with and without the balancing loss"
    )


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains two mixtures and divides them; if stopped, keeps finished parts."""
    corpus = open_corpus(config.corpus)
    windows = stream_windows(
        corpus.held_out, seq_len=config.seq_len, num_windows=config.num_windows
    )
    drops = []
    loads = []
    losses = []
    trained: Params | None = None
    for balancing in progress.track(tuple(BALANCE_WEIGHTS), "mixtures", "training"):
        training = config.training(balancing)
        outcome = train_in_memory(training, corpus, progress=progress)
        trained = outcome.params
        model = config.model(balancing)
        outputs = jax.jit(functools.partial(models.outputs, config=model))
        of_experts = outputs(trained, jnp.asarray(windows[:, :-1])).loads
        one = models.imbalance(of_experts)
        for p in config.devices:
            parts = of_experts.reshape(len(of_experts), p, -1).sum(axis=2)
            layers = zip(models.imbalance(parts).busiest, *one, strict=True)
            loads += [
                (balancing, layer, p, *map(float, values))
                for layer, values in enumerate(layers, 1)
            ]
        loss, more = _dropped(config, balancing, trained, windows)
        losses.append(loss)
        drops += more
    ways = _divide(config, trained, windows, progress) if trained is not None else []
    return Result(
        ways=LayoutTable.of(ways),
        drops=CapacityDrops.of(drops),
        loads=ExpertLoads.of(loads),
        params=count_model_parameters(config.model("with")).total,
        losses=np.array(losses),
    )


def _dropped(
    config: Config, balancing: str, params: Params, windows: np.ndarray
) -> tuple[float, list[tuple[object, ...]]]:
    """Returns the loss without drops, and drops and loss of each capacity factor."""
    model = config.model(balancing)
    p = max(config.devices)
    held_out = jnp.asarray(windows)
    gather_layout = parse_layout(f"ep={p},gather")
    rows = []
    base = _loss(model, gather_layout, params, held_out)

    @jax.jit
    def read(params: Params, tokens: Array) -> list[Routing]:
        return run_sequences(models.merge(model, params), tokens).routings

    # Routing of all tokens in each layer without drops.
    routings = read(params, held_out[:, :-1])
    for capacity in config.capacities:
        layout = parse_layout(f"ep={p},capacity={capacity:g}")
        device_tokens = len(windows) // p * config.seq_len
        chosen = {"top_k": config.top_k, "num_experts": config.num_experts}
        limit = layout.places(device_tokens, **chosen)
        lost = []
        for routing in routings:
            for begin in range(0, p * device_tokens, device_tokens):
                part = operator.itemgetter(slice(begin, begin + device_tokens))
                local_routing = jax.tree.map(part, routing)
                lost.append(dropped_fraction(local_routing, capacity=limit))
        sent = predicted_traffic(
            model, layout, batch=config.batch_size, sequence=config.seq_len
        )
        to_experts = sum(x.forward for x in sent if x.scheme == "expert")
        loss = _loss(model, layout, params, held_out)
        rows.append((balancing, capacity, float(np.mean(lost)), loss, to_experts))
    return base, rows


def _loss(model: ModelConfig, layout: Layout, params: Params, windows: Array) -> float:
    """Returns mean nats per token of windows under a layout."""
    gradient = divided_gradient(model, StepConfig(layout=layout))
    nats = jax.jit(lambda params, windows: gradient(params, windows)[0])
    return float(nats(place_training_tree(model, layout, params), windows))


def _divide(
    config: Config, params: Params, windows: np.ndarray, progress: lab.Progress
) -> list[tuple[object, ...]]:
    """Compiles every layout; compares its traffic and gradient, and times it."""
    model = config.model("with")
    held_out = jnp.asarray(windows[: config.batch_size])
    one = jax.jit(divided_gradient(model, StepConfig()))
    wanted = one(params, held_out)[1]
    rows = []
    steps = []
    for words in progress.track(config.layouts, "layouts", "compiling"):
        layout = parse_layout(words)
        mesh = make_training_mesh(layout)
        everywhere = NamedSharding(mesh, PartitionSpec())
        placed = jax.device_put(held_out, everywhere)
        arguments = place_training_tree(model, layout, params), placed
        gradient = divided_gradient(model, StepConfig(layout=layout))
        program: Any = jax.jit(gradient).lower(*arguments).compile()
        formula = predicted_traffic(
            model, layout, batch=config.batch_size, sequence=config.seq_len
        )
        both = [(x.forward + x.backward, x.scheme) for x in formula]
        steps.append(functools.partial(program, *arguments))
        grads = gather_tree(model, layout, steps[-1]()[1])
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True)
        errors = (
            float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max())
            for a, b in pairs
        )
        rows.append(
            (
                words,
                layout.num_devices,
                sum(size for size, scheme in both if scheme != "data"),
                sum(size for size, _ in both),
                collective_bytes(program),
                max(errors),
            )
        )
    times = median_seconds(steps, config.rounds)
    return [(*row, step_s) for row, step_s in zip(rows, times, strict=True)]


def metrics(result: Result) -> dict[str, object]:
    """Returns rows of all layouts, capacities and loads, and the losses."""
    return lab.metrics(result) | {"losses": result.losses.tolist()}


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of traffic and times, drops, and load imbalance."""
    both = zip(BALANCE_WEIGHTS, result.losses, strict=False)
    losses = ", ".join(f"{loss:.3f} {name}" for name, loss in both)
    return [
        result.ways.sheet(
            f"a device's part of a training step, {result.params:,} parameters",
            note="Activations: all traffic but gradients of weights, which replicas "
            "exchange. Times are of virtual CPU devices, between which sending is "
            "nearly free. Dropped choices are missing from the gradient.",
        ),
        result.drops.sheet(
            "drops by capacity factor, held-out text",
            note=f"Nats per token without drops: {losses} the balancing loss.",
        ),
        result.loads.sheet("load of devices and experts, held-out text"),
    ]


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares formulas with programs, and gradients with those of one device."""
    for row in result.ways.rows():
        words = row["layout"]
        yield lab.measured(
            "bytes", row["sent_bytes"], published=row["found_bytes"], layout=words
        )
        if "capacity" not in words:
            yield lab.measured("gradient", row["error"], layout=words)
    for capacity in result.drops.distinct("capacity"):
        both = result.drops.where(capacity=capacity)
        dropped = dict(zip(both.balancing.tolist(), both.dropped.tolist(), strict=True))
        if len(dropped) == len(BALANCE_WEIGHTS) and dropped["without"]:
            yield lab.measured(
                "drops",
                dropped["with"],
                published=dropped["without"],
                capacity=f"{capacity:g}",
            )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws traffic by number of devices, and drops by capacity factor."""
    from matplotlib import ticker

    left, right = axes
    ways = result.ways
    kinds = [words.partition(",")[2] or "tensor parallel" for words in ways.layout]
    last = {}
    for kind in dict.fromkeys(kinds):
        selected = np.array([row_kind == kind for row_kind in kinds])
        label = kind if kind.startswith("tensor") else f"expert parallel, {kind}"
        sent = ways.layers_bytes[selected] / 1e6
        system = "tensor" if label.startswith("tensor") else label.partition("=")[0]
        lab.draw_curve(left, ways.devices[selected], sent, system, label)
        last[label] = float(sent[-1])
    title = "Activations that a device sends in a step"
    if len(last) > 1:
        min_layout, max_layout = (f(last, key=lambda x: last[x]) for f in (min, max))
        title = f"{max(ways.devices)} devices: {min_layout} sends "
        title += f"1/{last[max_layout] / last[min_layout]:.0f} of {max_layout}"
    y = "sent in a step [MB]"
    lab.set_labels(left, title, "expert group [devices]", y, yscale="log")
    left.xaxis.set_major_locator(ticker.FixedLocator(ways.distinct("devices")))
    lab.label_log_axis(left.yaxis)
    left.legend()
    dropped = {}
    for name in BALANCE_WEIGHTS:
        subset = result.drops.where(balancing=name)
        label = f"{name} balancing"
        lab.draw_curve(
            right, subset.capacity, 100 * subset.dropped, label, f"{label} loss"
        )
        pairs = zip(subset.capacity, subset.dropped, strict=True)
        dropped |= {(name, x): y for x, y in pairs}
    shared = sorted({x for _, x in dropped}, key=lambda x: abs(x - 1.25))
    title = "Dropped choices by capacity factor"
    if shared and all((name, shared[0]) in dropped for name in BALANCE_WEIGHTS):
        shares = [100 * dropped[name, shared[0]] for name in BALANCE_WEIGHTS]
        title = f"Capacity {shared[0]:g}: {shares[0]:.0f} % of choices dropped with a "
        title += f"balancing loss, {shares[1]:.0f} % without"
    x = "capacity / even share [ratio]"
    y = "choices dropped [%]"
    lab.set_labels(right, title, x, y)
    right.set_ylim(bottom=0)
    right.legend()


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, metrics, panels=lab.Panels(1, 2, 3.6)
)
