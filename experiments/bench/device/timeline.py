"""What a step launches, how long that runs, and what lies between: by the profiler.

The engine serves a model of few layers of the 8B shape; two depths tell a layer from
what stands beside the layers.
"""

import collections
import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.bench.decode.ours import Ours
from experiments.harness import model_shapes
from jaxkv.models import checkpoints, transformer

NAMES = ("layers-2", "layers-8")
NUM_TOLD = 12
"""Kernels that are told of, those that take longest."""
GRAPHS = ("cuGraphLaunch", "cudaGraphLaunch")


class Event(NamedTuple):
    """Something that ran on the device; times in nanoseconds."""

    name: str
    start_ns: float
    duration_ns: float


def measure(size: str, name: str) -> dict[str, Any]:
    """Decodes under the profiler, and tells what a step was made of."""
    num_layers = int(name.partition("-")[2])
    is_real = size == "gpu"
    shape = model_shapes.RANDOM["random-8b" if is_real else "random-tiny"]
    depth = num_layers if is_real else num_layers // 2
    shape = dataclasses.replace(shape, num_layers=depth)
    dtype = "bfloat16" if is_real else "float32"
    params = transformer.init_params(shape, jax.random.key(0), dtype=dtype)
    batch, context, num_tokens = (32, 1024, 64) if is_real else (2, 8, 16)
    length = context + 17 + num_tokens
    budget = max(batch, 256 if is_real else 8)
    bounds = model_shapes.bounds(batch, length, token_budget=budget)
    ours = Ours(checkpoints.Loaded(shape, params, None, ()), bounds, dtype)
    prompts = [[0] * context] * batch
    quiet = ours.decode(prompts, num_tokens, 10.0)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            ours.decode(prompts, num_tokens, 10.0)
        ran, num_graphs = read(Path(folder))
    num_steps = num_tokens + bounds.steps_per_call
    return {
        "num_layers": shape.num_layers,
        "batch": batch,
        "context": context,
        "step_s": batch * quiet.decode_s / quiet.num_decoded,
        "graphs_per_step": num_graphs / num_steps,
        **tell(ran, num_steps),
    }


def read(folder: Path) -> tuple[list[Event], int]:
    """What ran on the device, in order, and how many graphs the host launched."""
    [path] = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    ran, num_graphs = [], 0
    planes = list(data.planes)
    on_gpu = any(x.name.startswith("/device:GPU") for x in planes)
    for plane in planes:
        is_device = plane.name.startswith("/device:GPU" if on_gpu else "/host:CPU")
        for line in plane.lines:
            for event in line.events:
                num_graphs += event.name in GRAPHS
                # On a CPU the operations are those with a name in the program.
                counts = line.name.startswith("Stream") if on_gpu else _is_op(event)
                if is_device and counts:
                    ran.append(Event(event.name, event.start_ns, event.duration_ns))
    return sorted(ran, key=lambda x: x.start_ns), num_graphs


def _is_op(event: Any) -> bool:
    inside = ("while", "call", "conditional")  # whose own operations are told
    return not event.name.startswith(inside) and any(
        name == "hlo_op" for name, _ in event.stats
    )


def tell(ran: list[Event], num_steps: int) -> dict[str, Any]:
    """Counts and times of what ran, for a step; events are in order of their start."""
    if not ran:
        raise ValueError("the profiler saw nothing run on the device")
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for event in ran:
        by_name[event.name].append(event.duration_ns * 1e-9)
    longest = sorted(by_name, key=lambda x: -sum(by_name[x]))[:NUM_TOLD]
    busy_ns, span_ns = _busy(ran)
    return {
        "launches_per_step": len(ran) / num_steps,
        "busy_share": busy_ns / span_ns,
        "kernels": [
            {
                "name": name[:80],
                "per_step": len(by_name[name]) / num_steps,
                "seconds_per_step": sum(by_name[name]) / num_steps,
            }
            for name in longest
        ],
    }


def _busy(ran: Iterable[Event]) -> tuple[float, float]:
    """Nanoseconds in which anything ran, and those from first to last."""
    busy, first, end = 0.0, None, 0.0
    for event in ran:
        stop = event.start_ns + event.duration_ns
        if first is None:
            first = end = event.start_ns
        busy += max(0.0, stop - max(end, event.start_ns))
        end = max(end, stop)
    assert first is not None
    return busy, max(end - first, 1.0)
