"""Checks of counts against those of the project."""

from typing import Any


def check_shape_counts(process: Any, name: str, shapes: list[dict[str, Any]]) -> str:
    """Compares one count for several shapes, the smallest first."""
    for entry in shapes:
        shape, sequence = entry["shape"], entry["sequence"]
        counts = process.call("count_transformer", shape, sequence)
        if name not in counts:
            return f"The answer has no {name!r}; it has {sorted(counts)}"
        difference = counts[name] - entry["expected"][name]
        if difference:
            return (
                f"{name} of {entry['name']} ({_format(shape)}, sequence={sequence}) is "
                f"{counts[name]:,} and must be {entry['expected'][name]:,}: "
                f"{abs(difference):,} too {'many' if difference > 0 else 'few'}"
                f"{explain_difference(abs(difference), shape, sequence)}"
            )
    return ""


def explain_difference(difference: float, shape: dict[str, Any], sequence: int) -> str:
    """Returns the part of a model that a difference is a small multiple of, or ""."""
    h, layers = shape["hidden_size"], shape["num_layers"]
    heads = shape["head_dim"]
    spared = max(shape["num_experts"] - shape["top_k"], 0)
    parts = {
        "the experts that a token does not use": 3 * h * shape["mlp_size"] * spared,
        "one vocab_size x hidden_size table": h * shape["vocab_size"],
        "the gap between query and K/V heads of every layer": (
            h * heads * (shape["num_q_heads"] - shape["num_kv_heads"])
        ),
        "K or V of one token of every layer": heads * shape["num_kv_heads"],
        "scores or values of every layer": (sequence**2 * heads * shape["num_q_heads"]),
        "a router in every layer": h * shape["num_experts"],
        "a norm in every layer": h,
    }
    for name, size in parts.items():
        times_layers = 1 if "table" in name else layers
        for scale, suffix in ((1, ""), (sequence, " for every token"), (16, " x 16 B")):
            unit = size * times_layers * scale
            if unit and difference in (unit, 2 * unit, 3 * unit, 4 * unit):
                return f", which is {difference // unit} x {name}{suffix}"
    return ""


def _format(shape: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.items())
