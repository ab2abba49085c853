"""How many tokens per second does training process, compared with PyTorch?

All systems train the same transformer from the same weights, with the same vocabulary,
heads, AdamW and number of threads. They run in rotation, and a row has medians over the
rounds, so that a disturbance affects all systems or is removed by the median. The
difference of the losses in the first steps shows whether the trainings are equal.
"""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from experiments import lab
from experiments.bench.tables import split_details
from experiments.bench.train import peers
from experiments.bench.train.peers import JaxkvTrainer, PyTorchTrainer
from experiments.harness import (
    format_absent,
    measure_in_turns,
    median_and_spread,
    start_peers,
)
from scaling import training
from scaling.corpora import VOCAB_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY_COLUMNS = ("implementation", "width")
DETAILS = ("spread", "loss_gap", "optimizer", "ceiling_flops_per_s", "mfu", "version")
DETAILS += ("absent",)


class Config(lab.ConfigRecord):
    """Model and workload, and the peers."""

    width: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    """Hidden sizes; each gives separate rows."""
    num_layers: lab.PositiveInt = 2
    """Layers, each with an MLP of four times the width."""
    head_dim: lab.PositiveInt = 16
    """Head size; the number of heads is width / head size."""
    batch_size: lab.PositiveInt = 32
    """Windows per step."""
    seq_len: lab.PositiveInt = 64
    """Predictions per window."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward pass of jaxkv; peers compute in float32."""
    rounds: lab.PositiveInt = 5
    """Turns of every system."""
    seconds: lab.PositiveFloat = 2.0
    """Duration of a turn, in s."""
    peer_python: Path | None = None
    """Python interpreter with torch, which is timed in eager mode and compiled."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if not self.width or any(x < 1 or x % self.head_dim for x in self.width):
            raise ValueError(
                f"width={self.width!r} must be multiples of head_dim={self.head_dim!r}"
            )


CONFIGS = {
    "real": Config(),
    "gpu": Config(
        width=(128, 256, 512, 1024),
        head_dim=64,
        batch_size=64,
        seq_len=512,
        dtype="bfloat16",
    ),
    "smoke": Config(
        width=(8,), head_dim=4, batch_size=4, seq_len=16, rounds=2, seconds=0.05
    ),
}


class TrainingRow(TypedDict):
    """Measurements of a system at a width."""

    implementation: str
    width: int
    tokens_per_s: float
    flops_per_s: float
    compile_s: float
    ratio: float | None
    spread: float
    loss_gap: float
    optimizer: str
    ceiling_flops_per_s: float
    mfu: float | None
    version: str
    absent: str


class TrainingRates(lab.ResultTable):
    """Columns of the report; each is a key of the rows."""

    width: lab.Ints = lab.column("hidden size", form=str)
    implementation: lab.Texts = lab.column("name of the system", heading="system")
    tokens_per_s: lab.Floats = lab.column("median rate", heading="tokens/s")
    ratio: np.ndarray = lab.column("rate / eager PyTorch's", form="{:.2f}")
    spread: lab.Floats = lab.column(
        "range of the rates / median", form=lab.format_percent
    )
    flops_per_s: lab.Floats = lab.column(
        "operations per second at that rate", heading="FLOP/s", form=lab.format_flops
    )
    ceiling_flops_per_s: lab.Floats = lab.column(
        "operations per second of large products"
    )
    compile_s: lab.Floats = lab.column(
        "time before the first step", heading="compiling"
    )
    loss_gap: lab.Floats = lab.column(
        "loss difference to jaxkv, first steps", form="{:.1e}"
    )
    optimizer: lab.Texts = lab.column("implementation of AdamW", heading="AdamW")

    @property
    @lab.computed_column(heading="of products", form=lab.format_percent)
    def of_products(self) -> np.ndarray:
        """Operations per second relative to those of large matrix products."""
        return self.flops_per_s / self.ceiling_flops_per_s


REPORTED = ("width", "implementation", "tokens_per_s", "ratio", "spread", "flops_per_s")
REPORTED += ("of_products", "compile_s", "loss_gap", "optimizer")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[TrainingRow]:
    """Times every width with all systems; a stopped run has complete widths."""
    rows: list[TrainingRow] = []
    with contextlib.ExitStack() as stack:
        progress.show("starting peers")
        rivals, absent = start_peers(
            stack, peers.PyTorchTrainer, config.peer_python, peers.PEERS, needed=True
        )

        def begin(width: int) -> list[JaxkvTrainer | PyTorchTrainer]:
            trainer = _make_trainer(config, width)
            for other in rivals:
                other.prepare(trainer, config.seconds)
            return [trainer, *rivals]

        for width, (trainer, *_), rates in measure_in_turns(
            config.width,
            config.rounds,
            begin,
            lambda width, one: one.rate(config.seconds),
            progress=progress,
            bar_label="training",
            case_name="width",
        ):
            assert isinstance(trainer, JaxkvTrainer)  # `begin` lists it first
            reason = format_absent(absent)
            rows += _rows(config, width, trainer, rivals, rates, reason)
    return rows


def _make_trainer(config: Config, width: int) -> JaxkvTrainer:
    """Returns the trainer of jaxkv for a width."""
    model = training.transformer(
        width,
        num_heads=width // config.head_dim,
        num_layers=config.num_layers,
        mlp_size=4 * width,
        vocab_size=VOCAB_SIZE,
        seq_len=config.seq_len,
    )
    model = dataclasses.replace(
        model,
        norm="layer",
        positions="learned",
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        family="gpt2",
    )
    return JaxkvTrainer(model, config.batch_size, config.seq_len, config.dtype)


def _rows(
    config: Config,
    width: int,
    trainer: JaxkvTrainer,
    rivals: list[PyTorchTrainer],
    rates: dict[str, list[float]],
    absent: str,
) -> Iterator[TrainingRow]:
    ceiling = peers.product_rate(config.dtype)
    # Ratios are to eager PyTorch, the first peer.
    peer = statistics.median(rates[rivals[0].name]) if rivals else None
    for one in (trainer, *rivals):
        rate, spread = median_and_spread(rates[one.name])
        yield {
            "implementation": one.name,
            "width": width,
            "tokens_per_s": rate,
            "flops_per_s": rate * trainer.flops_per_token,
            "compile_s": one.compile_s,
            "ratio": rate / peer if peer else None,
            "spread": spread,
            "loss_gap": float(np.max(np.abs(np.subtract(one.losses, trainer.losses)))),
            "optimizer": one.optimizer,
            "ceiling_flops_per_s": ceiling,
            "mfu": trainer.utilisation(rate),
            "version": one.version,
            "absent": absent,
        }


def plot(ax: "Axes", result: list[TrainingRow]) -> None:
    """Draws tokens per second against the width."""
    rates = TrainingRates.of(result)
    for name in rates.distinct("implementation"):
        selected = rates.where(implementation=name)
        lab.draw_curve(ax, selected.width, selected.tokens_per_s / 1000, name, name)
    lab.use_powers_of_two(ax)
    title = "Rate of training by width"
    ratios = [
        x["ratio"] for x in result if x["implementation"] == "jaxkv" and x["ratio"]
    ]
    if ratios:
        low = min(ratios)
        high = max(ratios)
        title = f"jaxkv trains {low:.2f} to {high:.2f} times as fast as PyTorch"
    rate = "training [thousand tokens/s]"
    lab.set_labels(ax, title, "width [features]", rate, yscale="log")
    lab.label_log_axis(ax.yaxis)
    if result:
        ax.legend()


def summary(result: list[TrainingRow]) -> list[lab.ReportPart]:
    """Tabulates the rates of all systems, relative to matrix products."""
    if not result:
        return []
    ceiling = lab.format_flops(
        statistics.median(x["ceiling_flops_per_s"] for x in result)
    )
    note = f"Products of 2,048 x 2,048 matrices: {ceiling} per second."
    used = [x["mfu"] for x in result if x["mfu"] is not None]
    if used:
        note += f" Of the data sheet's rate: {lab.format_percent(max(used))} at best."
    if result[0]["absent"]:
        note += f" Not timed: {result[0]['absent']}."
    return [TrainingRates.of(result).sheet("training", *REPORTED, note=note)]


STUDY = lab.Study(
    CONFIGS,
    list,
    run,
    plot,
    summary=summary,
    metrics=functools.partial(split_details, names=KEY_COLUMNS, details=DETAILS),
)
