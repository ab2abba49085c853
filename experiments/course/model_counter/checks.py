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
            size = abs(difference)
            return (
                f"{name} of {entry['name']} ({_format(shape)}, sequence={sequence}) is "
                f"{counts[name]:,} and must be {entry['expected'][name]:,}: "
                f"{size:,} too {'many' if difference > 0 else 'few'}"
                f"{explain_difference(name, size, shape, sequence)}"
            )
    return ""


def explain_difference(
    name: str, difference: int, shape: dict[str, Any], sequence: int
) -> str:
    """Returns the parts of a model that a difference is a small multiple of, or ""."""
    h = shape["hidden_size"]
    size = shape["head_dim"]
    heads = shape["num_q_heads"]
    kv_heads = shape["num_kv_heads"]
    mlp = h * shape["mlp_size"]
    spared = shape["num_experts"] - shape["top_k"]
    unit = {"forward_flops": 2 * sequence, "training_bytes": 16}.get(name, 1)
    parts = {
        "a norm in every layer": h,
        "a router in every layer": h * shape["num_experts"],
        "the products of queries or outputs": h * size * heads,
        "the products of keys or values": h * size * kv_heads,
        "the query heads without K/V heads of their own": h * size * (heads - kv_heads),
        "a matrix of every MLP": mlp * max(shape["num_experts"], 1),
        "the experts that a token does not use": 3 * mlp * spared,
        "the vocab_size x hidden_size table": h * shape["vocab_size"],
        "the last norm": h,
    }
    if name == "kv_bytes_per_token":
        parts = {
            "the bytes of keys or values": 2 * size * kv_heads,
            "those of query heads without K/V heads": 2 * size * (heads - kv_heads),
        }
    if name == "forward_flops":
        parts["the scores or the sums of values"] = sequence * size * heads
    outside = ("the vocab_size x hidden_size table", "the last norm")
    matches = []
    for part, weights in parts.items():
        whole = weights * unit * (1 if part in outside else shape["num_layers"])
        if whole and difference in (whole, 2 * whole, 3 * whole, 4 * whole):
            matches.append(f"{difference // whole} x {part}")
    return f", which is {' or '.join(matches)}" if matches else ""


def _format(shape: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.items())
