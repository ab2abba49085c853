"""Tables of `jaxkv cost` that depend on the device: serving, traffic, one device."""

from typing import Any

from experiments.cli.cost.case import CostCase
from experiments.framework import Sheet, units
from scaling.costs import flops, memory, serving, traffic
from scaling.shapes import HeadAttention


def device_sheets(case: CostCase, document: dict[str, Any]) -> list[Sheet]:
    """Returns tables of serving, traffic, and the share of one device."""
    rows = [
        (
            f"{x.scheme}: {x.name}",
            x.formula,
            *map(units.format_bytes, (x.forward, x.backward)),
        )
        for x in case.evaluate(traffic.training_traffic)
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
            units.format_flops(work["flops"]),
            units.format_rate(work["intensity"]),
        )
        read = map(units.format_bytes, (work["weight_bytes"], work["kv_bytes"]))
        times = map(units.format_seconds, (work["compute_s"], work["memory_s"]))
        rows.append((name, counted[0], *read, counted[1], *times, work["bound"]))
    heads = ("step", "operations", "weights", "K and V", "op/byte")
    dtype, d = case.dtype, case.device
    kept = case.evaluate(serving.sequence_kv_bytes, tokens=case.sequence)
    note = (
        f"K and V: {document['kv_bytes_per_token']:,.0f} bytes a token, "
        f"{units.format_bytes(kept)} for s tokens. "
        f"{case.layout.sharing:,} x {d.name} ({d.rate(dtype) / 1e12:,.0f} TFLOP/s "
        f"{dtype}, {d.bandwidth / 1e9:,.0f} GB/s): compute-bound from "
        f"{case.ridge:.0f} op/byte; {case.evaluate(serving.max_batch):,} such "
        "sequences fit in the memory that the weights leave."
    )
    more = ("products", "memory", "bound by")
    return Sheet("serving, lower bounds", (*heads, *more), rows, note)


def _passes(case: CostCase, heads: tuple[str, ...]) -> list[Sheet]:
    """Returns the traffic of a device in decode and prefill steps of an engine."""
    batch, cp = case.batch, case.layout.pages
    size: Any = {"number_bytes": case.number_bytes}
    sizes = size | {"rows": batch * case.sequence, "logit_rows": batch}
    is_divided = "divided" if sizes["rows"] % cp == 0 else "not divided"
    kinds = (
        ("decode", traffic.decode_traffic, size, "step of b rows, s = 1"),
        (
            "prefill",
            traffic.prefill_traffic,
            sizes,
            f"pass over b s rows, {is_divided} by cp={cp}",
        ),
    )
    found = []
    for name, formula, given, unit in kinds:
        rows = [
            (f"{x.scheme}: {x.name}", x.formula, units.format_bytes(x.forward))
            for x in case.evaluate(formula, **given)
        ]
        note = f"Bytes that a device sends in one {unit}."
        found.append(Sheet(f"communication, {name}", heads, rows, note))
    return found


def per_device(case: CostCase) -> dict[str, float]:
    """Returns the memory and work of one device in a training step of a micro-batch.

    Operations are those of an average device; the first and last pipeline stages have
    more.
    """
    layout, d = case.layout, case.device
    step, parts = (
        case.evaluate(flops.training_step_flops),
        layout.tensor * layout.pipeline,
    )
    each = (step.model + step.recomputed) / (parts * layout.context)
    sent = sum(x.forward + x.backward for x in case.evaluate(traffic.training_traffic))
    kv = case.evaluate(serving.kv_bytes_per_token)
    if isinstance(case.model.attention, HeadAttention):
        kv /= min(layout.tensor, case.model.attention.num_kv_heads)
    return {
        "num_params": sum(case.evaluate(memory.max_device_params)),
        "flops": each,
        "compute_s": each / d.bfloat16,
        "sent_bytes": sent,
        "link_s": sent / d.link,
        "kv_bytes_per_token": kv / (layout.pipeline * layout.pages),
    }


def _device(case: CostCase, found: dict[str, float]) -> Sheet:
    d = case.device
    rows = [
        ("parameters of the fullest device", f"{found['num_params']:,.0f}"),
        ("operations of a training step", units.format_flops(found["flops"])),
        ("time of these operations at peak", units.format_seconds(found["compute_s"])),
    ]
    if found["sent_bytes"]:
        rows += [
            ("bytes sent", units.format_bytes(found["sent_bytes"])),
            ("time of these bytes on the link", units.format_seconds(found["link_s"])),
        ]
    rows.append(("K and V per token", f"{found['kv_bytes_per_token']:,.0f} bytes"))
    measured = []
    if d.measured_products:
        measured.append(f"{d.measured_products / 1e12:.0f} TFLOP/s")
    if d.measured_bandwidth:
        measured.append(f"{d.measured_bandwidth / 1e9:.0f} GB/s")
    note = (
        f"{d.name}: {d.bfloat16 / 1e12:,.0f} TFLOP/s in 16 bits, "
        f"{units.format_bytes(d.memory_bytes)}, link {d.link / 1e9:.0f} GB/s one way "
        f"({d.source})."
    )
    if measured:
        note += f" Measured maximum: {', '.join(measured)} ({d.measured_source})."
    title = f"one of {case.layout.num_devices:,} devices"
    return Sheet(title, ("a micro-batch", "value"), rows, note)
