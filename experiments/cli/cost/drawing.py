"""The figure of `jaxkv cost`: what a model's numbers are made of, and its roofline."""

from typing import TYPE_CHECKING, Any

from experiments.plotting import style
from scaling.costs import flops

if TYPE_CHECKING:
    from experiments.cli.cost.command import Case

PANELS = (2, 2)

_POLICIES = ("none", "selective", "boundary")
_CONTEXTS = (128, 1024, 8192)


def render(case: "Case") -> dict[str, bytes]:
    """Draws the figure and returns its files by name."""
    return style.render(lambda axes: draw(axes, case), panels=PANELS)


def draw(axes: Any, case: "Case") -> None:
    """Draws on an array of four axes."""
    _flops(axes[0, 0], case)
    _memory(axes[0, 1], case)
    _decode(axes[1, 0], case)
    _prefill(axes[1, 1], case)


def _flops(ax: Any, case: "Case") -> None:
    """Operations of a token against the length, stacked by part."""
    lengths = [2**x for x in range(8, 18)]
    parts: dict[str, list[float]] = {}
    for length in lengths:
        terms = flops.forward(
            case.model, sequence=length, attention=case.options.attention
        )
        sums: dict[str, float] = {}
        for term in terms:
            part = "scores, values" if term.growth == "s^2" else _PARTS[term.part]
            sums[part] = sums.get(part, 0.0) + term.flops / length / 1e9
        for part, value in sums.items():
            parts.setdefault(part, []).append(value)
    order = [name for name in _COLORS if name in parts]
    ax.stackplot(
        lengths,
        [parts[name] for name in order],
        labels=order,
        colors=[style.colors()[_COLORS[name]] for name in order],
    )
    ax.axvline(case.sequence, color="0.3", linewidth=0.6, linestyle=":")
    ax.set_xscale("log", base=2)
    ax.set_xlim(lengths[0], lengths[-1])
    ax.set_xlabel("sequence (tokens)")
    ax.set_ylabel("forward (GFLOP per token)")
    ax.set_title(f"{case.model.name}: operations, {case.options.attention} attention")
    ax.legend(loc="upper left", reverse=True)


_PARTS = {
    "attention": "projections",
    "mlp": "FFN",
    "experts": "experts",
    "head": "head",
    "ahead": "ahead",
}
_COLORS = {"head": 7, "projections": 5, "FFN": 3, "experts": 1, "scores, values": 6}


def _memory(ax: Any, case: "Case") -> None:
    """Training memory of the fullest device under three policies, stacked."""
    found = [case.memory(checkpointing=policy) for policy in _POLICIES]
    bottom = [0.0] * len(found)
    groups = {
        "weights": ("weights",),
        "gradients": ("gradients",),
        "optimizer": ("master", "moments"),
        "activations": ("activations", "recomputed", "ends"),
        "logits and gradient": ("logits", "logits_gradient"),
    }
    for color, (label, names) in enumerate(groups.items(), start=1):
        heights = [sum(getattr(x, name) for name in names) / 1e9 for x in found]
        ax.bar(
            _POLICIES,
            heights,
            bottom=bottom,
            label=label,
            color=style.colors()[color],
            width=0.6,
        )
        bottom = [x + y for x, y in zip(bottom, heights, strict=True)]
    limit = case.device.memory_bytes / 1e9
    ax.axhline(limit, color="0.3", linewidth=0.8, linestyle="--")
    ax.annotate(
        case.device.name,
        (len(found) - 0.55, limit),
        ha="right",
        va="bottom",
        color="0.3",
    )
    ax.set_ylim(0, max(*bottom, limit) * 1.6)
    ax.set_xlabel("checkpointing")
    ax.set_ylabel("training memory (GB)")
    ax.set_title(f"{case.batch} x {case.sequence} tokens, {_devices(case)}")
    ax.legend(loc="upper right", ncols=2)


def _decode(ax: Any, case: "Case") -> None:
    """Operations per byte of decoding against the batch, by tokens kept."""
    batches = [2**x for x in range(13)]
    for color, context in enumerate(_CONTEXTS, start=1):
        shifted = case._replace(sequence=context)
        values = [shifted.decode(batch).intensity for batch in batches]
        ax.plot(batches, values, color=style.colors()[color])
        ax.annotate(
            f"{context:,}",
            (batches[-1], values[-1]),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            color=style.colors()[color],
            annotation_clip=False,
        )
    _roof(ax, case, batches)
    ax.set_xlabel("batch (sequences)")
    ax.set_title("decoding, by tokens kept of each")


def _prefill(ax: Any, case: "Case") -> None:
    """Operations per byte of reading a prompt against its length."""
    one = case._replace(batch=1)
    lengths = [2**x for x in range(14)]
    values = [one.prefill(length).intensity for length in lengths]
    ax.plot(lengths, values, color=style.colors()[3])
    _roof(ax, case, lengths)
    ax.set_xlabel("prompt (tokens)")
    ax.set_title("reading a prompt")


def _roof(ax: Any, case: "Case", sizes: list[int]) -> None:
    """The ridge: above it products take the time, below it memory."""
    ridge = case.device.ridge(case.options.dtype)
    ax.axhline(ridge, color="0.3", linewidth=0.8, linestyle="--")
    ax.annotate(
        f"{case.device.name}: {ridge:.0f}\nmemory binds below",
        (sizes[0], ridge),
        xytext=(3, 2),
        textcoords="offset points",
        va="bottom",
        color="0.3",
    )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(sizes[0], sizes[-1])
    low, high = ax.get_ylim()
    ax.set_ylim(low, max(high, 3 * ridge))
    ax.set_ylabel("operations per byte")


def _devices(case: "Case") -> str:
    number = case.layout.num_devices
    return "one device" if number == 1 else f"fullest of {number:,} devices"
