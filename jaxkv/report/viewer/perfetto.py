"""A run as a trace file of Perfetto and Chrome: slots as tracks, counters, events.

Source: Trace Event Format, https://chromium.googlesource.com/catapult (JSON).
"""

import json

import numpy as np

from jaxkv.report.viewer.run_events import list_events
from jaxkv.report.viewer.run_trace import RunTrace


def make_perfetto_trace(trace: RunTrace) -> str:
    """Returns JSON that ui.perfetto.dev and chrome://tracing open.

    A track for each slot has the requests that it ran, with prefill and decode inside;
    counters have the running and waiting requests and the pages in use. Times are in
    microseconds since the first step.
    """
    info = trace.info
    start_us = np.round((trace.start_s - trace.start_s[0]) * 1e6).astype(int)
    # The last step is taken to be as long as the one before it.
    last = start_us[-1] + (start_us[-1] - start_us[-2] if trace.num_steps > 1 else 1)
    edges = [*start_us.tolist(), int(last)]
    num_slots = info.request_id.shape[1]
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": slot, "name": "thread_name"}
        | {"args": {"name": f"slot {slot}"}}
        for slot in range(num_slots)
    ]
    phase = np.where(trace.is_prefill, "prefill", "decode")
    for slot in range(num_slots):
        names = [
            f"request {request}, sequence {sample}" if request >= 0 else ""
            for request, sample in zip(
                info.request_id[:, slot].tolist(),
                info.sample[:, slot].tolist(),
                strict=True,
            )
        ]
        inner = [
            (name, part) if name else ""
            for name, part in zip(names, phase[:, slot].tolist(), strict=True)
        ]
        for values in (names, inner):
            start = 0
            for step in range(1, trace.num_steps + 1):
                if step < trace.num_steps and values[step] == values[start]:
                    continue
                if value := values[start]:
                    name = value if isinstance(value, str) else value[1]
                    times = {"ts": edges[start], "dur": edges[step] - edges[start]}
                    events.append({"ph": "X", "pid": 0, "tid": slot, "name": name})
                    events[-1] |= times
                start = step
    counters = {
        "running": (info.request_id >= 0).sum(1),
        "waiting": info.num_waiting,
        "pages in use": info.used_pages,
    }
    for name, values in counters.items():
        events += [
            {"ph": "C", "pid": 0, "name": name, "ts": time, "args": {name: value}}
            for time, value in zip(start_us.tolist(), values.tolist(), strict=True)
        ]
    events += [
        {"ph": "i", "pid": 0, "tid": max(x.slot, 0), "s": "p", "name": x.text}
        | {"ts": edges[x.step]}
        for x in list_events(trace)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
