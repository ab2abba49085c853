"""Do the cost formulas agree with the counts of JAX and XLA?

Small models of each family that the project can run are counted twice. Parameters: by
`jax.eval_shape`. Operations: by XLA's analysis of the compiled forward pass and
gradient. Bytes kept for the backward pass: by the residuals of `jax.vjp`. The temporary
bytes that XLA plans for the compiled gradient are listed for comparison: XLA recomputes
some residuals and never holds all of them at once, so no formula predicts that number.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from experiments import lab
from jaxkv import models
from jaxkv.models import ModelConfig, Params, param_shapes
from scaling.costs import (
    count_parameters,
    list_residuals,
    total_residual_bytes,
    training_step_flops,
)
from scaling.shapes import describe_config
from scaling.training import token_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KEPT_SEQUENCE = 256
"""Tokens of a sequence whose residuals are counted: more than one attention tile,
because attention over shorter sequences keeps its weights."""


_BIASED = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
_GPT_SETTINGS = {
    "norm": "layer",
    "positions": "learned",
    "gated": False,
    "num_kv_heads": 8,
}
_FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tie_embeddings": False},
    "qwen3": {"qk_norm": True, "head_dim": 64},
    "gpt2": {**_GPT_SETTINGS, **_BIASED, "activation": "gelu_tanh"},
    "opt": {**_GPT_SETTINGS, **_BIASED, "activation": "relu", "position_offset": 2},
}


class Config(lab.ConfigRecord):
    """Size of the models; small enough for one attention tile."""

    hidden_size: int = 256
    """A multiple of 32: eight heads of even size."""
    num_layers: lab.PositiveInt = 2
    """Layers, unrolled."""
    batch: Annotated[int, lab.Range(2)] = 4
    """Sequences."""
    sequence: Annotated[int, lab.Range(1, 128)] = 128
    """Tokens; at most one tile, because XLA counts a loop body once."""
    families: Annotated[tuple[str, ...], lab.Choices(_FAMILY_SETTINGS)] = (
        *_FAMILY_SETTINGS,
    )
    """Model families."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.hidden_size < 32 or self.hidden_size % 32:
            raise ValueError(
                f"hidden_size={self.hidden_size!r} must be a multiple of 32"
            )


class CountRow(TypedDict):
    """Formulas and counts of a model."""

    family: str
    params: int
    params_jax: int
    forward_flops: float
    forward_flops_xla: float
    training_flops: float
    training_flops_xla: float
    kept_bytes: int
    kept_bytes_vjp: int
    xla_temporary_bytes: int


type Quantity = Literal[
    "params",
    "params_jax",
    "forward_flops",
    "forward_flops_xla",
    "training_flops",
    "training_flops_xla",
    "kept_bytes",
    "kept_bytes_vjp",
]
CONFIGS = {
    "real": Config(),
    "smoke": Config(num_layers=1, families=("qwen3",)),
}


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[CountRow]:
    """Counts every model; a run that is stopped early has the completed ones."""
    families = progress.track(config.families, "models", "models")
    return [_row(config, family) for family in families]


def _row(config: Config, family: str) -> CountRow:
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_q_heads": 8,
        "num_kv_heads": 4,
        "head_dim": config.hidden_size // 8,
        "mlp_size": 8 * config.hidden_size // 3,
        "max_positions": max(config.sequence, _KEPT_SEQUENCE),
    }
    model = ModelConfig(**sizes | _FAMILY_SETTINGS[family])
    shape = describe_config(model)
    step = training_step_flops(shape, batch=config.batch, sequence=config.sequence)
    listed = list_residuals(model, number_bytes=4)
    forward, gradient = (_compiled(model, config, kind) for kind in ("forward", "grad"))
    held = jax.tree.leaves(param_shapes(model))
    more, less = (_count_vjp_bytes(model, _KEPT_SEQUENCE, b) for b in (config.batch, 1))
    return {
        "family": family,
        "params": count_parameters(shape).total,
        "params_jax": sum(x.size for x in held),
        "forward_flops": step.forward,
        "forward_flops_xla": float(forward.cost_analysis()["flops"]),
        "training_flops": step.model,
        "training_flops_xla": float(gradient.cost_analysis()["flops"]),
        "kept_bytes": total_residual_bytes(listed, config.batch * _KEPT_SEQUENCE),
        # The difference of two batch sizes cancels the weights.
        "kept_bytes_vjp": (more - less) * config.batch // (config.batch - 1),
        "xla_temporary_bytes": gradient.memory_analysis().temp_size_in_bytes,
    }


def _compiled(model: ModelConfig, config: Config, kind: str) -> Any:
    """Compiles the forward pass, or the gradient of the mean loss, from shapes."""

    def loss(params: Params, windows: Array) -> Array:
        return jnp.mean(token_losses(params, windows, model=model))

    width = config.sequence + (kind == "grad")  # the last token is predicted only
    tokens = jax.ShapeDtypeStruct((config.batch, width), jnp.int32)
    forward = functools.partial(models.logits, config=model)
    step = jax.value_and_grad(loss) if kind == "grad" else forward
    return jax.jit(step).lower(param_shapes(model), tokens).compile()


def _count_vjp_bytes(model: ModelConfig, sequence: int, batch: int) -> int:
    """Returns the bytes that the vjp of the forward pass holds, weights included."""

    def pull(params: Params, tokens: Array) -> PyTree[Array]:
        forward = functools.partial(models.logits, tokens=tokens, config=model)
        return jax.vjp(forward, params)[1]

    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    held = jax.eval_shape(pull, param_shapes(model), tokens)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))


@lab.claims_file(__file__).judge
def claims(result: list[CountRow]) -> Iterator[lab.MeasuredValue]:
    """Compares the formulas with the counts."""
    for row in result:
        yield lab.measured(
            "parameters", row["params"], published=row["params_jax"], **row
        )
        for phase in ("forward", "training"):
            formula, count = COUNT_PAIRS[phase]
            yield lab.measured(
                "operations", row[formula], published=row[count], phase=phase, **row
            )
        yield lab.measured(
            "kept", row["kept_bytes"], published=row["kept_bytes_vjp"], **row
        )


COUNT_PAIRS: Mapping[str, tuple[Quantity, Quantity]] = {
    "parameters": ("params", "params_jax"),
    "forward": ("forward_flops", "forward_flops_xla"),
    "training": ("training_flops", "training_flops_xla"),
    "kept": ("kept_bytes", "kept_bytes_vjp"),
}
"""Formula and count of each quantity."""


def formula_over_count(row: CountRow, quantity: str) -> float:
    """Returns the ratio of formula to count for one of `COUNT_PAIRS`."""
    formula, count = COUNT_PAIRS[quantity]
    return row[formula] / row[count]


def summary(result: list[CountRow]) -> list[lab.ReportPart]:
    """Tabulates formulas and counts."""
    rows = [
        (
            row["family"],
            f"{row['params']:,}",
            f"{formula_over_count(row, 'forward'):.4f}",
            f"{formula_over_count(row, 'training'):.4f}",
            f"{row['kept_bytes']:,}",
            f"{formula_over_count(row, 'kept'):.4f}",
            f"{row['xla_temporary_bytes']:,}",
        )
        for row in result
    ]
    heads = ("model", "parameters", "forward", "training", "kept bytes", "kept")
    note = (
        "Forward, training, kept: ratio of formula to count. Temporary bytes: XLA's "
        "plan for the compiled gradient."
    )
    return [lab.Sheet("formula and count", (*heads, "temporary bytes"), rows, note)]


MARKER_STYLES = (
    *((lab.BLUE, "o"), (lab.SKY, "s"), (lab.GREEN, "^")),
    *((lab.ORANGE, "D"), (lab.RED, "v"), (lab.PURPLE, "P")),
)
"""Colour and marker of the families, in order."""


def plot(ax: "Axes", result: list[CountRow]) -> None:
    """Draws the ratio of formula to count."""
    places = np.arange(len(COUNT_PAIRS))
    off = [0.0]
    for i, (row, (color, marker)) in enumerate(
        zip(result, MARKER_STYLES, strict=False)
    ):
        shift = (i - (len(result) - 1) / 2) * 0.14
        ratios = [100 * formula_over_count(row, name) for name in COUNT_PAIRS]
        look = {"marker": marker, "linestyle": "", "markersize": 7}
        lab.draw_curve(ax, places + shift, ratios, color, row["family"], **look)
        off += [abs(x - 100) for x in ratios]
    ax.axhspan(98, 102, color="0.93", zorder=0)
    lab.draw_reference_line(ax, 100, "equal")
    ax.set_xticks(places, [COUNT_NAMES.get(name, name) for name in COUNT_PAIRS])
    title = f"The formulas are within {max(off):.1f} % of the counts of XLA"
    lab.set_labels(ax, title, "", "formula / count [%]", ylim=(96, 104))
    ax.legend()


COUNT_NAMES = {
    "forward": "operations,\nforward",
    "training": "operations,\ntraining",
    "kept": "bytes kept",
}
"""Labels of the quantities in the figure, if they differ from the keys."""


STUDY = lab.Study(CONFIGS, list, run, plot, claims, summary, panels=lab.Panels(1, 1))
