"""The tables of `jaxkv cost` that depend on a device: serving, traffic, one device."""

from typing import TYPE_CHECKING

from experiments.framework import Sheet, units
from scaling.costs import memory, serving
from scaling.shapes import HeadAttention

if TYPE_CHECKING:
    from experiments.cli.cost.command import Case


def sheets(case: "Case") -> list[Sheet]:
    """Lays out what serving takes, what is sent, and one device's part."""
    return [_serving(case), *_traffic(case), _device(case)]


def _serving(case: "Case") -> Sheet:
    rows = []
    for name, work in (("prefill", case.prefill()), ("decode, a step", case.decode())):
        line = case.roofline(work)
        rows.append(
            (
                name,
                units.flops(work.flops),
                units.size(work.weight_bytes),
                units.size(work.kv_bytes),
                units.rate(work.intensity),
                units.seconds(line.compute_s),
                units.seconds(line.memory_s),
                line.bound,
            )
        )
    heads = ("step", "operations", "weights", "K and V", "op/byte")
    dtype, d = case.options.dtype, case.device
    per_token = serving.kv_bytes_per_token(case.model, kv_bytes=case.weight_bytes)
    kept = serving.kv_bytes_of(case.model, case.sequence, kv_bytes=case.weight_bytes)
    fit = serving.max_batch(
        case.model,
        d,
        context=case.sequence,
        num_devices=case.layout.sharing,
        weight_bytes=case.weight_bytes,
        kv_bytes=case.weight_bytes,
    )
    note = (
        f"K and V: {per_token:,.0f} bytes a token, {units.size(kept)} for s tokens. "
        f"{case.layout.sharing:,} x {d.name} ({d.rate(dtype) / 1e12:,.0f} TFLOP/s "
        f"{dtype}, {d.bandwidth / 1e9:,.0f} GB/s): products take the time from "
        f"{d.ridge(dtype):.0f} op/byte on; beside the weights {fit:,} such sequences "
        "fit."
    )
    more = ("products", "memory", "bound by")
    return Sheet("serving, at best", (*heads, *more), rows, note)


def _traffic(case: "Case") -> list[Sheet]:
    rows = [
        (
            f"{x.scheme}: {x.name}",
            x.formula,
            units.size(x.forward),
            units.size(x.backward),
        )
        for x in case.traffic()
    ]
    if not rows:
        return []
    heads = ("exchange", "per device", "forward", "backward")
    note = "Bytes that a device sends in one step of one micro-batch."
    return [Sheet("communication", heads, rows, note)]


def per_device(case: "Case") -> dict[str, float]:
    """What one device has to hold and to do in a training step of a micro-batch.

    Operations are those of an average device; the ends of a pipeline have more.
    """
    layout, d = case.layout, case.device
    step = case.training()
    flops = (step.model + step.recomputed) / (
        layout.tensor * layout.pipeline * layout.context
    )
    sent = sum(x.forward + x.backward for x in case.traffic())
    stages = range(layout.pipeline)
    held = [memory.held(case.model, layout, stage=x) for x in stages]
    kv = serving.kv_bytes_per_token(case.model, kv_bytes=case.weight_bytes)
    if isinstance(case.model.attention, HeadAttention):
        kv /= min(layout.tensor, case.model.attention.num_kv_heads)
    return {
        "num_params": max(map(sum, held)),
        "flops": flops,
        "compute_s": flops / d.bfloat16,
        "sent_bytes": sent,
        "link_s": sent / d.link,
        "kv_bytes_per_token": kv / layout.pipeline,
    }


def _device(case: "Case") -> Sheet:
    found, d = per_device(case), case.device
    rows = [
        ("parameters of the fullest", f"{found['num_params']:,.0f}"),
        ("operations of a training step", units.flops(found["flops"])),
        ("their time at peak", units.seconds(found["compute_s"])),
    ]
    if found["sent_bytes"]:
        rows += [
            ("bytes sent", units.size(found["sent_bytes"])),
            ("their time on the link", units.seconds(found["link_s"])),
        ]
    rows.append(("K and V of a token", f"{found['kv_bytes_per_token']:,.0f} bytes"))
    measured = [
        f"{rate:.0f} {unit}"
        for rate, unit in (
            (d.measured_products / 1e12, "TFLOP/s"),
            (d.measured_bandwidth / 1e9, "GB/s"),
        )
        if rate
    ]
    note = (
        f"{d.name}: {d.bfloat16 / 1e12:,.0f} TFLOP/s in 16 bits, "
        f"{units.size(d.memory_bytes)}, link {d.link / 1e9:.0f} GB/s one way "
        f"({d.source})."
    )
    if measured:
        note += f" Measured at best: {', '.join(measured)} ({d.measured_source})."
    title = f"one of {case.layout.num_devices:,} devices"
    return Sheet(title, ("a micro-batch", "value"), rows, note)
