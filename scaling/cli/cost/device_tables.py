"""Tables of `jaxkv cost` that depend on the device: serving, traffic, one device."""

from typing import Any

from jaxkv.report import Sheet, format_bytes, format_flops, format_rate, format_seconds
from scaling.cli.cost.case import CostCase
from scaling.costs import (
    decode_traffic,
    kv_bytes_per_token,
    max_batch,
    max_device_params,
    prefill_traffic,
    sequence_kv_bytes,
    sequence_state_bytes,
    training_step_flops,
    training_traffic,
)
from scaling.shapes import HeadAttention


def device_sheets(case: CostCase, document: dict[str, Any]) -> list[Sheet]:
    """Returns tables of serving, traffic, and the share of one device."""
    rows = [
        (
            f"{x.scheme}: {x.name}",
            x.formula,
            *map(format_bytes, (x.forward, x.backward)),
        )
        for x in case.evaluate(training_traffic)
    ]
    heads = ("exchange", "per device", "forward", "backward")
    note = "Bytes that a device sends in one step of one micro-batch."
    if (stages := case.layout.pipeline) > 1:
        note += f" T = {2 * stages - 1} ticks; g micro-batches share the bubble."
    sent = [Sheet("communication", heads, rows, note)] if rows else []
    if case.layout.pages > 1:
        sent += _passes(case, heads[:3])
    return [_serving(case, document), *sent, _device(case, document["per_device"])]


def _serving(case: CostCase, document: dict[str, Any]) -> Sheet:
    rows = []
    for name, step in (("prefill", "prefill"), ("decode, a step", "decode")):
        work = document[step]
        counted = (
            format_flops(work["flops"]),
            format_rate(work["intensity"]),
        )
        read = map(format_bytes, (work["weight_bytes"], work["kv_bytes"]))
        times = map(format_seconds, (work["compute_s"], work["memory_s"]))
        rows.append((name, counted[0], *read, counted[1], *times, work["bound"]))
    heads = ("step", "operations", "weights", "K and V", "op/byte")
    dtype = case.dtype
    d = case.device
    kv_bytes = case.evaluate(sequence_kv_bytes, tokens=case.sequence)
    unreleased = ""
    if any(case.model.windows):
        kept_bytes = document["kv_bytes_per_token"] * case.sequence
        unreleased = f" ({format_bytes(kept_bytes)} if pages behind windows are kept)"
    states = case.evaluate(sequence_state_bytes)
    state = f" States: {format_bytes(states)} a sequence." if states else ""
    note = (
        f"K and V: {document['kv_bytes_per_token']:,.0f} bytes a token, "
        f"{format_bytes(kv_bytes)} for s tokens{unreleased}.{state} "
        f"{case.layout.sharing:,} x {d.name} ({d.rate(dtype) / 1e12:,.0f} TFLOP/s "
        f"{dtype}, {d.bandwidth / 1e9:,.0f} GB/s): compute-bound from "
        f"{case.ridge:.0f} op/byte; {case.evaluate(max_batch):,} such "
        "sequences fit in the memory that the weights leave."
    )
    more = ("products", "memory", "bound by")
    return Sheet("serving, lower bounds", (*heads, *more), rows, note)


def _passes(case: CostCase, heads: tuple[str, ...]) -> list[Sheet]:
    """Returns the traffic of a device in decode and prefill steps of an engine."""
    batch = case.batch
    cp = case.layout.pages
    size = {"number_bytes": case.number_bytes}
    sizes = size | {"rows": batch * case.sequence, "logit_rows": batch}
    is_divided = "divided" if sizes["rows"] % cp == 0 else "not divided"
    kinds = (
        ("decode", decode_traffic, size, "step of b rows, s = 1"),
        (
            "prefill",
            prefill_traffic,
            sizes,
            f"pass over b s rows, {is_divided} by cp={cp}",
        ),
    )
    sheets = []
    for name, formula, arguments, unit in kinds:
        rows = [
            (f"{x.scheme}: {x.name}", x.formula, format_bytes(x.forward))
            for x in case.evaluate(formula, **arguments)
        ]
        note = f"Bytes that a device sends in one {unit}."
        sheets.append(Sheet(f"communication, {name}", heads, rows, note))
    return sheets


def per_device(case: CostCase) -> dict[str, float]:
    """Returns the memory and work of one device in a training step of a micro-batch.

    Operations are those of an average device; the first and last pipeline stages have
    more.
    """
    layout = case.layout
    d = case.device
    step = case.evaluate(training_step_flops)
    parts = layout.tensor * layout.pipeline
    device_flops = (step.model + step.recomputed) / (parts * layout.context)
    sent = sum(x.forward + x.backward for x in case.evaluate(training_traffic))
    kv = case.evaluate(kv_bytes_per_token)
    if isinstance(case.model.attention, HeadAttention):
        kv /= min(layout.tensor, case.model.attention.num_kv_heads)
    return {
        "num_params": sum(case.evaluate(max_device_params)),
        "flops": device_flops,
        "compute_s": device_flops / d.bfloat16,
        "sent_bytes": sent,
        "link_s": sent / d.link,
        "kv_bytes_per_token": kv / (layout.pipeline * layout.pages),
    }


def _device(case: CostCase, numbers: dict[str, float]) -> Sheet:
    d = case.device
    rows = [
        ("parameters of the fullest device", f"{numbers['num_params']:,.0f}"),
        ("operations of a training step", format_flops(numbers["flops"])),
        ("time of these operations at peak", format_seconds(numbers["compute_s"])),
    ]
    if numbers["sent_bytes"]:
        rows += [
            ("bytes sent", format_bytes(numbers["sent_bytes"])),
            ("time of these bytes on the link", format_seconds(numbers["link_s"])),
        ]
    rows.append(("K and V per token", f"{numbers['kv_bytes_per_token']:,.0f} bytes"))
    measured = []
    if d.measured_products:
        measured.append(f"{d.measured_products / 1e12:.0f} TFLOP/s")
    if d.measured_bandwidth:
        measured.append(f"{d.measured_bandwidth / 1e9:.0f} GB/s")
    note = (
        f"{d.name}: {d.bfloat16 / 1e12:,.0f} TFLOP/s in 16 bits, "
        f"{format_bytes(d.memory_bytes)}, link {d.link / 1e9:.0f} GB/s one way "
        f"({d.source})."
    )
    if measured:
        note += f" Measured maximum: {', '.join(measured)} ({d.measured_source})."
    title = f"one of {case.layout.num_devices:,} devices"
    return Sheet(title, ("a micro-batch", "value"), rows, note)
