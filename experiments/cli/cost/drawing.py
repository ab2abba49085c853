"""The figure of `jaxkv cost`: what a model's numbers are made of, and its roofline."""

from collections import Counter
from typing import Any

from experiments.cli.cost.case import Case
from experiments.plotting import style
from scaling.costs import flops, memory, serving

_POLICIES = ("none", "selective", "boundary")
_CONTEXTS = (128, 1024, 8192)


def render(case: Case) -> dict[str, bytes]:
    """Draws the figure and returns its files by name."""

    def draw(axes: Any) -> None:
        _flops(axes[0, 0], case)
        _memory(axes[0, 1], case)
        _decode(axes[1, 0], case)
        _prefill(axes[1, 1], case)

    return style.render(draw, panels=(2, 2))


def _flops(ax: Any, case: Case) -> None:
    """Operations of a token against the length, stacked by part."""
    lengths = [2**x for x in range(8, 18)]
    parts: dict[str, list[float]] = {}
    for length in lengths:
        sums: Counter[str] = Counter()
        for term in case.of(flops.forward, batch=1, sequence=length):
            part = "scores, values" if term.growth == "s^2" else _PARTS[term.part]
            sums[part] += term.flops / length / 1e9
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
    title = f"{case.model.name}: operations, {case.attention} attention"
    style.titled(ax, title, "sequence (tokens)", "forward (GFLOP per token)")
    ax.legend(loc="upper left", reverse=True)


_PARTS = {
    "attention": "projections",
    "mlp": "FFN",
    "experts": "experts",
    "head": "head",
    "ahead": "ahead",
}
_COLORS = {"head": 7, "projections": 5, "FFN": 3, "experts": 1, "scores, values": 6}


def _memory(ax: Any, case: Case) -> None:
    """Training memory of the fullest device under three policies, stacked."""
    found = [case.of(memory.training, checkpointing=policy) for policy in _POLICIES]
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
        look = {"label": label, "color": style.colors()[color], "width": 0.6}
        ax.bar(_POLICIES, heights, bottom=bottom, **look)
        bottom = [x + y for x, y in zip(bottom, heights, strict=True)]
    limit = case.device.memory_bytes / 1e9
    ax.axhline(limit, color="0.3", linewidth=0.8, linestyle="--")
    where = {"ha": "right", "va": "bottom", "color": "0.3"}
    ax.annotate(case.device.name, (len(found) - 0.55, limit), **where)
    ax.set_ylim(0, max(*bottom, limit) * 1.6)
    ax.set(xlabel="checkpointing", ylabel="training memory (GB)")
    number = case.layout.num_devices
    devices = "one device" if number == 1 else f"fullest of {number:,} devices"
    ax.set_title(f"{case.batch} x {case.sequence} tokens, {devices}")
    ax.legend(loc="upper right", ncols=2)


def _decode(ax: Any, case: Case) -> None:
    """Operations per byte of decoding against the batch, by tokens kept."""
    batches = [2**x for x in range(13)]
    for number, context in enumerate(_CONTEXTS, start=1):
        works = [case.of(serving.decode, batch=x, context=context) for x in batches]
        color = style.colors()[number]
        ax.plot(batches, [work.intensity for work in works], color=color)
        end = batches[-1], works[-1].intensity
        look = {"fontsize": 7, "va": "center", "color": color}
        style.note(ax, f"{context:,}", end, (3, 0), annotation_clip=False, **look)
    _roof(ax, case, batches)
    ax.set(xlabel="batch (sequences)", title="decoding, by tokens kept of each")


def _prefill(ax: Any, case: Case) -> None:
    """Operations per byte of reading a prompt against its length."""
    lengths = [2**x for x in range(14)]
    works = [case.of(serving.prefill, batch=1, prompt=x) for x in lengths]
    ax.plot(lengths, [work.intensity for work in works], color=style.colors()[3])
    _roof(ax, case, lengths)
    ax.set(xlabel="prompt (tokens)", title="reading a prompt")


def _roof(ax: Any, case: Case, sizes: list[int]) -> None:
    """The ridge: above it products take the time, below it memory."""
    ridge = case.ridge
    style.ridge(ax, case.device.name, ridge, sizes[0])
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", ylabel="operations per byte", xlim=(sizes[0], sizes[-1]))
    low, high = ax.get_ylim()
    ax.set_ylim(low, max(high, 3 * ridge))
