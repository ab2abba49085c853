"""What a plan says of architectures: the nearest, what it takes, and for how long."""

from experiments.cli.plan import find
from experiments.cli.plan.case import DAY_S, Case, device_seconds, division, price
from experiments.cli.plan.find import Found
from experiments.framework import Sheet, units
from scaling.costs import parameters, serving
from scaling.plan import Design
from scaling.shapes import HeadAttention


def nearest(case: Case, found: Found) -> Sheet:
    """Shows the design nearest to N with its counts and memory."""
    design, best = found.design, found.optimum
    model, counts = design.model, parameters.parameters(design.model)
    heads = model.attention
    assert isinstance(heads, HeadAttention)
    rows = [
        ("width h", f"{model.hidden_size:,}"),
        ("layers", f"{model.num_layers:,}"),
        ("query heads", f"{heads.num_q_heads:,} of {heads.head_dim}"),
        ("KV heads", f"{heads.num_kv_heads:,}"),
        (
            "FFN width",
            f"{model.mlp_size:,} ({model.mlp_size / model.hidden_size:.2f} h)",
        ),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("parameters, total", f"{counts.total:,}"),
        ("non-embedding", f"{counts.non_embedding:,}"),
        ("matmul", f"{counts.matmul:,}"),
        ("training memory", units.size(found.memory.total)),
        ("K and V of a token", units.size(serving.kv_bytes_per_token(model))),
    ]
    needed = find.min_devices(case, found)
    held = (
        ""
        if needed is None or case.offer is None
        else f": at least {needed} {case.offer.name} of "
        f"{units.size(case.offer.memory_bytes)}"
    )
    off = 100 * (design.num_params / best.num_params - 1)
    note = (
        "Of all designs of Llama's kind on the grid, the nearest in "
        f"{case.family.count} parameters: {off:+.3g} % from N.{_as_fitted(case)} "
        f"Memory is that of one sequence of {case.family.sequence:,} tokens, "
        f"checkpoints at layer boundaries, 16 bytes a parameter{held}."
    )
    return Sheet("Which architecture?", ("", ""), rows, note)


def _as_fitted(case: Case) -> str:
    """Says what the architecture has from the runs that were fitted."""
    family, fitted = case.family, case.belief.shape
    words = {"vocab_size": "vocabulary", "sequence": "length of sequences"}
    if family.tie_embeddings:
        words["tie_embeddings"] = "tied embeddings"
    same = [words[name] for name in words if fitted.get(name) == getattr(family, name)]
    return f" As in the runs that were fitted: {', '.join(same)}." if same else ""


def exact(case: Case, found: Found) -> Sheet:
    """Says what 6 N D leaves out, and which design is best without it."""
    design, best = found.design, found.optimum
    ratio = design.flops_per_token / (6 * design.num_params)
    other, tokens, loss = found.exact
    said = (
        f"Counting every product, attention over {case.family.sequence:,} tokens "
        f"({case.family.attention}) too, this design takes "
        f"{design.flops_per_token:.4g} FLOPs a token to train, {ratio:.3f} times 6 N. "
    )
    if found.design_tokens:
        achieved = float(case.loss(float(design.num_params), found.design_tokens))
        said += (
            f"So the budget trains it on {found.design_tokens:.4g} tokens, not "
            f"{best.num_tokens:.4g}: loss {achieved:.4f}. "
        )
    device_s = device_seconds(case, design.flops_per_token * best.num_tokens)
    if device_s is not None:
        said += f"All {best.num_tokens:.4g} take {device_s / 3600:,.0f} device-hours"
        cost = price(case, device_s)
        said += ". " if cost is None else f", {cost:,.0f} USD. "
    said += (
        f"The best of all designs when each pays for its own operations: "
        f"{short(other)}, {other.num_params:,} parameters on {tokens:.4g} tokens, "
        f"loss {loss:.4f}."
    )
    return words("And if every operation counts?", said)


def time(case: Case, found: Found) -> Sheet:
    """Says how long training takes, on how many devices."""
    device_s = train_s(case, found)
    assert device_s is not None
    assert case.offer is not None
    number, duration_s = division(case, device_s)
    said = (
        f"Training takes {device_s:.4g} seconds of one {case.offer.name}: "
        f"{device_s / 3600:,.0f} device-hours"
    )
    if number is None or duration_s is None:
        said += ". --days or --devices gives the other of the two."
    else:
        said += (
            f"; on {number:,} of them {duration_s / DAY_S:,.4g} days, if the "
            "utilisation holds at that number."
        )
    return words("How long?", said)


def train_s(case: Case, found: Found) -> float | None:
    """Counts the seconds of one device that training takes, 6 N D."""
    best = found.optimum
    return device_seconds(case, 6 * best.num_params * best.num_tokens)


def short(design: Design) -> str:
    """Names a design in a line."""
    model = design.model
    heads = model.attention
    assert isinstance(heads, HeadAttention)
    return (
        f"{model.num_layers} layers x {model.hidden_size:,}, {heads.num_q_heads} heads "
        f"({heads.num_kv_heads} KV), FFN {model.mlp_size:,}"
    )


def big(value: float) -> str:
    """Writes a number of parameters or tokens: 47.48 B."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.4g} {letter}"
    return f"{value:.4g}"


def words(title: str, said: str) -> Sheet:
    """Lays out a paragraph with a title."""
    return Sheet(title, ("",), [(said,)])
