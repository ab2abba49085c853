"""Kernels of a decode step, with times and gaps, from the profiler.

The engine serves models of the 8B shape with few layers; two depths separate the time
of a layer from the work outside the layers.
"""

import collections
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench.decode.jaxkv_engine import JaxkvEngine
from experiments.harness import RANDOM_SHAPES, make_benchmark_config
from jaxkv.models import LoadedModel, init_params

MODEL_NAMES = ("layers-2", "layers-8")
NUM_LISTED = 12
"""Number of kernels in the result, those with the longest total time."""
GRAPHS = ("cuGraphLaunch", "cudaGraphLaunch")
CALLERS = ("while", "call", "conditional")
"""Operations whose inner operations are recorded separately."""


class KernelEvent(NamedTuple):
    """An operation on the device; times in nanoseconds."""

    name: str
    start_ns: float
    duration_ns: float


def profile_decode(size: str, name: str) -> dict[str, object]:
    """Decodes under the profiler; returns counts and times per step."""
    is_real = size == "gpu"
    shape = RANDOM_SHAPES["random-8b" if is_real else "random-tiny"]
    depth = int(name.partition("-")[2]) // (1 if is_real else 2)
    shape = dataclasses.replace(shape, num_layers=depth)
    dtype = "bfloat16" if is_real else "float32"
    params = init_params(shape, jax.random.key(0), dtype=dtype)
    batch, context, num_tokens = (32, 1024, 64) if is_real else (2, 8, 16)
    bounds = make_benchmark_config(
        batch, context + 17 + num_tokens, token_budget=256 if is_real else 8
    )
    engine = JaxkvEngine(LoadedModel(shape, params, None, ()), bounds, dtype)
    prompts = [[0] * context] * batch
    quiet = engine.decode(prompts, num_tokens, 10.0)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            engine.decode(prompts, num_tokens, 10.0)
        ran, num_graphs = read_profile(Path(folder))
    num_steps = num_tokens + bounds.steps_per_call
    return {
        "num_layers": shape.num_layers,
        "batch": batch,
        "context": context,
        "step_s": batch * quiet.decode_s / quiet.num_decoded,
        "graphs_per_step": num_graphs / num_steps,
        **summarize_events(ran, num_steps),
    }


def read_profile(folder: Path) -> tuple[list[KernelEvent], int]:
    """Returns the device operations in order, and the number of graph launches."""
    [path] = folder.rglob("*.xplane.pb")
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    ran = []
    num_graphs = 0
    on_gpu = any(x.name.startswith("/device:GPU") for x in planes)
    for plane in planes:
        is_device = plane.name.startswith("/device:GPU" if on_gpu else "/host:CPU")
        for line in plane.lines:
            for event in line.events:
                num_graphs += event.name in GRAPHS
                if on_gpu:
                    counts = line.name.startswith("Stream")
                else:  # operations have a name in the program
                    counts = not event.name.startswith(CALLERS)
                    counts = counts and any(x == "hlo_op" for x, _ in event.stats)
                if is_device and counts:
                    ran.append(
                        KernelEvent(event.name, event.start_ns, event.duration_ns)
                    )
    return sorted(ran, key=lambda x: x.start_ns), num_graphs


def summarize_events(ran: Sequence[KernelEvent], num_steps: int) -> dict[str, Any]:
    """Returns counts and times per step; events are sorted by their start."""
    if not ran:
        raise ValueError("the profiler recorded no operation on the device")
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for event in ran:
        by_name[event.name].append(event.duration_ns * 1e-9)
    longest = sorted(by_name, key=lambda x: -sum(by_name[x]))[:NUM_LISTED]
    starts = np.array([x.start_ns for x in ran])
    stops = starts + [x.duration_ns for x in ran]
    ends = np.maximum.accumulate(stops)
    busy_from = np.maximum(starts, np.append(starts[0], ends[:-1]))
    busy_ns = np.maximum(stops - busy_from, 0.0).sum()
    return {
        "launches_per_step": len(ran) / num_steps,
        "busy_share": float(busy_ns / max(ends[-1] - starts[0], 1.0)),
        "kernels": [
            {
                "name": name[:80],
                "per_step": len(by_name[name]) / num_steps,
                "seconds_per_step": sum(by_name[name]) / num_steps,
            }
            for name in longest
        ],
    }
