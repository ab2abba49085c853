"""How many tokens a second do we train on, and how many does PyTorch?

Everyone trains the same transformer from the same weights: same vocabulary, heads,
AdamW and number of threads. They take turns, round after round, and a row holds medians
over the rounds: a disturbance hits everyone or is voted out. What the losses of the
first steps differ by says whether it is the same training.
"""

import contextlib
import dataclasses
import statistics
from pathlib import Path
from typing import Any, Literal

from experiments.bench.decode import peers as decode_peers
from experiments.bench.train import peers as train_peers
from experiments.bench.train.peers import Ours, Rival
from experiments.framework import Part, Sheet, units
from jaxkv import validation
from jaxkv.progress import QUIET, Progress

ROW = ("implementation", "width", "tokens_per_s", "flops_per_s", "compile_s", "ratio")
COLORS = {"jaxkv": "#0072b2", "PyTorch": "#e69f00", "PyTorch, compiled": "0.6"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What is trained, and beside whom."""

    width: tuple[int, ...] = (16, 32, 64, 128)
    """Hidden sizes; each gives rows of its own."""
    num_layers: int = 2
    """Layers, each with an MLP of four times the width."""
    head_dim: int = 16
    """Features of an attention head; a width has as many heads as fill it."""
    batch_size: int = 32
    """Windows per step."""
    seq_len: int = 64
    """Predictions per window."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of our forward and backward pass; peers compute in float32."""
    rounds: int = 5
    """Turns that everyone has."""
    seconds: float = 2.0
    """How long a turn is."""
    peer_python: Path | None = None
    """A Python that has torch, timed as it is and compiled."""

    def __post_init__(self) -> None:
        """Refuses what cannot be trained."""
        validation.at_least(
            self, "num_layers", "head_dim", "batch_size", "seq_len", "rounds"
        )
        if not self.width or any(x < 1 or x % self.head_dim for x in self.width):
            raise ValueError(f"{self.width=} must be multiples of {self.head_dim=}")
        validation.above(self, "seconds")


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


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Times every width with everyone; ended early, it has whole widths."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        progress.show("starting peers")
        others, absent = _start(config, stack)
        turns = [(x, turn) for x in config.width for turn in range(config.rounds + 1)]
        everyone: list[Ours | Rival] = []
        rates: dict[str, list[float]] = {}
        for width, turn in progress.track(turns, "training", "turns"):
            if turn == 0:
                progress.show(f"width {width}, compiling")
                ours = Ours(train_peers.Case.of(config, width), config.dtype)
                for other in others:
                    other.prepare(ours, config.seconds)
                everyone = [ours, *others]
                rates = {one.name: [] for one in everyone}
                continue
            for one in everyone:
                progress.show(f"width {width}, {one.name}")
                rates[one.name].append(one.rate(config.seconds))
            if turn == config.rounds:
                rows += _rows(config, width, everyone, rates, absent)
    return rows


def _start(
    config: Config, stack: contextlib.ExitStack
) -> tuple[list[Rival], list[str]]:
    """Starts the peers that can be; says why the others are not there."""
    if config.peer_python is None:
        return [], []
    python, threads = config.peer_python, decode_peers.num_threads()
    return decode_peers.start(
        stack, python, (Rival(kind, python, threads) for kind in train_peers.KINDS)
    )


def _rows(
    config: Config,
    width: int,
    everyone: list[Ours | Rival],
    rates: dict[str, list[float]],
    absent: list[str],
) -> list[dict[str, Any]]:
    ours = everyone[0]
    assert isinstance(ours, Ours)
    ceiling = train_peers.product_rate(config.dtype)
    peer = [statistics.median(rates[one.name]) for one in everyone[1:]]
    rows = []
    for one in everyone:
        every = sorted(rates[one.name])
        rate = statistics.median(every)
        row = {
            "implementation": one.name,
            "width": width,
            "tokens_per_s": rate,
            "flops_per_s": rate * ours.flops_per_token,
            "compile_s": one.compile_s,
            # Beside plain PyTorch, the first of them; compiled stands for itself.
            "ratio": rate / peer[0] if peer else None,
            "spread": (every[-1] - every[0]) / rate,
            "loss_gap": _gap(one.losses, ours.losses),
            "optimizer": one.optimizer,
            "ceiling_flops_per_s": ceiling,
            "mfu": ours.utilisation(rate),
            "version": one.version,
            "absent": "; ".join(absent),
        }
        rows.append(row)
    return rows


def _gap(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def plot(ax: Any, result: list[dict[str, Any]]) -> None:
    """Draws tokens per second over the width."""
    for name in dict.fromkeys(row["implementation"] for row in result):
        rows = [row for row in result if row["implementation"] == name]
        x, y = ([row[key] for row in rows] for key in ("width", "tokens_per_s"))
        ax.plot(x, y, "o-", ms=3, label=name, color=COLORS.get(name))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("width")
    ax.set_ylabel("training [tokens/s]")
    if result:
        ax.legend()


def metrics(result: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives the speeds, and apart from them what to know of everyone."""
    about = [x for row in result[:1] for x in row if x not in ROW]
    names = ("implementation", "width", *about)
    return {
        "rows": [{key: row[key] for key in ROW} for row in result],
        "details": [{key: row[key] for key in names} for row in result],
    }


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Tells the rates of everyone, side by side, and how near they are to products."""
    if not result:
        return []
    heads = ["width", "who", "tokens/s", "ratio", "spread", "FLOP/s"]
    heads += ["of products", "compiling", "loss gap", "AdamW"]
    lines = [
        [
            *(str(row["width"]), row["implementation"]),
            units.rate(row["tokens_per_s"]),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            units.share(row["spread"]),
            units.flops(row["flops_per_s"]),
            units.share(row["flops_per_s"] / row["ceiling_flops_per_s"]),
            units.seconds(row["compile_s"]),
            f"{row['loss_gap']:.1e}",
            row["optimizer"],
        ]
        for row in result
    ]
    ceiling = units.flops(statistics.median(x["ceiling_flops_per_s"] for x in result))
    note = f"Products of 2,048 x 2,048 matrices: {ceiling} per second."
    used = [x["mfu"] for x in result if x["mfu"] is not None]
    if used:
        note += f" Of the data sheet's rate: {units.share(max(used))} at best."
    if result[0]["absent"]:
        note += f" Not timed: {result[0]['absent']}."
    return [Sheet("training", heads, lines, note)]
