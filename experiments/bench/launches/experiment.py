"""What does a step of the engine launch on a GPU, and what waits for the host?

The program of `run_steps` is compiled for an H200 that is not there, under the options
that the engine compiles with, and the compiler's plan is read: what one step launches,
way by way through its loops and branches, and in which part of the step; which loops
and branches are not captured in a CUDA graph, so that the host must look; and whether a
weight is ever copied. What a launch or a graph costs only a device tells.
"""

import dataclasses
import functools
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.framework import (
    Measurement,
    ResultRecord,
    ResultTable,
    Sheet,
    claims_file,
    column,
    config_json,
    measured,
    report,
)
from experiments.framework.table import Floats, Ints, Texts
from experiments.plotting import style, systems
from jaxkv import validation
from jaxkv.engine import EngineConfig, step
from jaxkv.engine.state import init
from jaxkv.models import ModelConfig, paged, transformer
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs
from pallas_kernels import devices
from pallas_kernels.bench import deviceless, launches
from pallas_kernels.bench.launches import Route, Thunk

TARGET = "NVIDIA H200"
PARTS = tuple("counts schedule apply_plan pack advance emit retire info".split())
"""Named scopes of a step, but for the forward pass."""
_GREEDY = {"decode": 1, "draw": 1}
_SAMPLED = {**_GREEDY, "asked": 1, "sampled": 1, "cut": 1, "whole_mass": 1}
ROUTES = (
    Route("greedy", _GREEDY),
    Route("sampled", _SAMPLED),
    Route("mixed", {"mixed": 1, "draw": 1}),
)
"""Every slot decodes and takes the largest logit; every slot draws under top-k and
top-p, which the best tokens settle; some read prompts. Nothing else happens."""
FILLING = Route("filling", {**_GREEDY, "enter": 1})
"""As greedy, and some slots fill a page, which enters the prefix cache: at most what is
launched then, since every loop in there is counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A dense Llama in bfloat16, and the engine that serves it."""

    hidden_size: int = 4096
    """Features of a row."""
    mlp_size: int = 14336
    """Width of the MLP."""
    num_q_heads: int = 32
    """Query heads."""
    num_kv_heads: int = 8
    """KV heads, a divisor of the query heads."""
    head_dim: int = 128
    """64, 128 or 256: what the kernels take."""
    vocab_size: int = 128_256
    """Tokens."""
    num_layers: tuple[int, ...] = (2, 8, 32)
    """Depths to compile, each at least 1; launches are counted at the first one."""
    scanned: bool = False
    """Whether to scan over stacked layers."""
    max_slots: int = 32
    """Sequences at a time."""
    token_budget: int = 256
    """Rows of a step."""
    max_length: int = 2048
    """Tokens of a sequence."""
    prefix_cache: bool = False
    """Whether the engine has one."""

    def __post_init__(self) -> None:
        """Refuses depths that cannot be."""
        if not self.num_layers or min(self.num_layers) < 1:
            raise ValueError(
                f"num_layers={self.num_layers!r} must be depths of at least 1"
            )
        if self.head_dim not in (64, 128, 256):
            raise ValueError(f"head_dim={self.head_dim!r} must be 64, 128 or 256")
        validation.at_least(self, "max_slots", low=1)
        for depth in self.num_layers:
            self.model(depth)
        self.engine()

    def model(self, num_layers: int) -> ModelConfig:
        """The model of that depth."""
        names = ("vocab_size", "hidden_size", "mlp_size", "head_dim")
        names += ("num_q_heads", "num_kv_heads")
        return ModelConfig(
            **{name: getattr(self, name) for name in names},
            num_layers=num_layers,
            max_positions=self.max_length,
            tie_embeddings=False,
        )

    def engine(self) -> EngineConfig:
        """The bounds of its engine, with pages for every slot's longest sequence."""
        return EngineConfig(
            page_size=16,
            num_pages=self.max_slots * -(-self.max_length // 16),
            max_slots=self.max_slots,
            max_length=self.max_length,
            token_budget=self.token_budget,
            prefix_cache=self.prefix_cache,
        )


_SMALL: dict[str, Any] = dict(
    hidden_size=256,
    mlp_size=512,
    num_q_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=512,
    num_layers=(1,),
    max_slots=8,
    token_budget=128,
    max_length=256,
)
CONFIGS = {
    "real": Config(),
    "scanned": Config(scanned=True, num_layers=(2, 32)),
    "prefix_cache": Config(prefix_cache=True, num_layers=(2,)),
    "smoke": Config(**_SMALL),
}


PANEL_SIZE_INCHES = (6.8, 6.0)
"""Wide enough for a number over each bar."""


class LaunchCounts(ResultTable):
    """What a step launches."""

    path: Texts = column("the way that it goes")
    part: Texts = column("of the step")
    launches: Ints = column("kernels, products and copies, of a layer for one")


class DataDependentLoops(ResultTable):
    """Loops and branches that a step may come by."""

    path: Texts = column("named scopes around it")
    kind: Texts = column("`While` or `Conditional`")
    captured: Ints = column("1 in a CUDA graph, 0 where the host looks")


class CompileTimes(ResultTable):
    """What compiling takes."""

    layers: Ints = column("depth")
    cpu_s: Floats = column("of processor, all threads", form="{:.1f}")
    wall_s: Floats = column("of clock", form="{:.1f}")


class Launches(ResultRecord):
    """What one step of the engine launches."""

    counts: LaunchCounts
    waits: DataDependentLoops
    compiled: CompileTimes
    prefix_cache: bool = column("whether the engine has one")
    weight_copies: int = column("copies of arrays of a weight's shape")
    pool_bytes: int = column("K and V")
    alias_bytes: int = column("results in the place of arguments")

    def per(self, which: str) -> dict[str, int]:
        """Launches of a `layer`, the `forward` pass beside, or the `step` beside it."""
        found = dict.fromkeys(self.counts.distinct("path"), 0)
        for row in self.counts.rows():
            if which == (
                row["part"] if row["part"] in ("layer", "forward") else "step"
            ):
                found[row["path"]] += row["launches"]
        return found


def prepare() -> None:
    """Has JAX load the compiler for GPUs, before it starts its devices."""
    deviceless.prepare()


def run(config: Config, progress: Progress = QUIET) -> Launches:
    """Compiles every depth; ended early, it has those that are done."""
    prepare()
    if (reason := deviceless.available()) is not None:
        raise ValueError(f"cannot compile for an H200: {reason}")
    counts, waits, compiled, found = (
        LaunchCounts.of([]),
        DataDependentLoops.of([]),
        [],
        (0, 0, 0),
    )
    cached = config.prefix_cache
    for depth in progress.track(config.num_layers, "compiling", "depths"):
        with tempfile.TemporaryDirectory() as folder:
            program, arguments, pool = _program(config, depth)
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            compiler_report = deviceless.compile(
                program,
                *arguments,
                donate_argnums=1,
                options={**devices.COMPILER_OPTIONS, "xla_dump_to": folder},
            )
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            compiled.append((depth, cpu_s, wall_s))
            if len(counts):
                continue
            plan = launches.read(Path(folder))
        copies = weight_copies(compiler_report.text, arguments[0])
        found = copies, pool, compiler_report.alias_bytes
        routes = (*ROUTES, FILLING) if cached else ROUTES
        counts = count_launches(plan, 1 if config.scanned else depth, routes)
        loops = [
            (thunk, inside)
            for thunk, inside in launches.walk(plan)
            if thunk.kind in launches.LOOPS and thunk.trips is None
        ]
        waits = DataDependentLoops.of(
            (scope_of(x), x.kind, any(y.kind == "CommandBuffer" for y in inside))
            for x, inside in loops
        )
    return Launches(counts, waits, CompileTimes.of(compiled), cached, *found)


def _program(config: Config, depth: int) -> tuple[Any, tuple[Any, ...], int]:
    """`run_steps`, the shapes of its arguments, and the bytes of K and V."""
    model, engine = config.model(depth), config.engine()
    pages = jax.eval_shape(lambda: paged.make_pages(model, engine, dtype="bfloat16"))
    params = transformer.param_shapes(model, dtype="bfloat16", stacked=config.scanned)
    program = functools.partial(
        step.run_steps,
        config=engine,
        forward=paged.PagedForward(model),
        policy=fcfs.fcfs(),
    )
    state = jax.eval_shape(functools.partial(init, engine), pages)
    clock = jax.ShapeDtypeStruct((2,), jnp.int32)
    pool = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    return program, (params, state, clock), pool


def count_launches(
    plan: list[Thunk], num_layers: int, routes: Sequence[Route] = ROUTES
) -> LaunchCounts:
    """Counts by way and part what one step launches; of a layer for one of them."""
    rows = []
    [steps] = [x for x in plan if x.kind == "While" and x.trips is not None]
    for route in routes:
        found: dict[str, int] = dict.fromkeys(("layer", "forward", *PARTS, "other"), 0)
        chosen = _Quiet(route.name, route.choices)
        for thunk, times, inside in launches.executed([steps], chosen):
            found[_part(thunk, inside)] += times
        found["layer"] = -(-found["layer"] // num_layers)
        rows += [(route.name, part, num) for part, num in found.items()]
    return LaunchCounts.of(rows)


class _Quiet(Route):
    """A route on which whatever it does not name does not happen."""

    def choice(self, thunk: Thunk) -> int:
        return self.choices.get(scope_of(thunk).rpartition("/")[2], 0)


def _part(thunk: Thunk, inside: tuple[Thunk, ...]) -> str:
    """The part of the step that a thunk belongs to; what is nameless, by its loop."""
    scopes = "/".join(x.scope for x in (*inside, thunk)).split("/")
    if "layer" in thunk.scope.split("/") or "layers" in scopes:
        return "layer"
    # Rows are packed where they are fed, which is no work of the model's.
    if part := next((part for part in PARTS if part in scopes), None):
        return part
    return "forward" if "decode" in scopes or "mixed" in scopes else "other"


def scope_of(thunk: Thunk) -> str:
    """The named scopes around a thunk, without what JAX and XLA add."""
    strange = r"jit\(.*\)|while|cond|body|closed_call|eval_jaxpr|branch_\d+_fun"
    names = [x for x in thunk.scope.split("/") if not re.fullmatch(strange, x)]
    return "/".join(names)


def weight_copies(text: str, params: Any) -> int:
    """Copies, in an optimised program, of arrays of a weight's shape."""
    weights = {
        f"bf16[{','.join(map(str, x.shape[lead:]))}]"
        for x in jax.tree.leaves(params)
        for lead in (0, 1)
        if x.ndim - lead > 1
    }
    copies = re.findall(r"= (\w+\[[\d,]+\])\S* copy\(", text)
    return sum(shape in weights for shape in copies)


def metrics(result: Launches) -> dict[str, Any]:
    """The counts by path, for JSON."""
    parts: dict[str, dict[str, int]] = {}
    for row in result.counts.rows():
        parts.setdefault(row["path"], {})[row["part"]] = row["launches"]
    other_parts = {
        path: {x: found[x] for x in found if x not in ("layer", "forward")}
        for path, found in parts.items()
    }
    for path, num in result.per("step").items():
        parts[path]["step"] = num
    return {
        "target": TARGET,
        "flags": ", ".join(f"{k}={v}" for k, v in devices.COMPILER_OPTIONS.items()),
        **parts,
        **{f"per_{which}": result.per(which) for which in ("layer", "forward", "step")},
        "parts": other_parts,
        "loops_outside_graphs": int(np.sum(result.waits.captured == 0)),
        "weight_copies": result.weight_copies,
        "compile_s": float(result.compiled.wall_s.sum()),
        **{
            f"compile_{row['layers']}_layers_s": row["wall_s"]
            for row in result.compiled.rows()
        },
    }


def summary(result: Launches) -> list[Sheet]:
    """The tables of a report: each count once."""
    repeated = ("per_layer", "per_forward", "per_step", "parts", "compile_s")
    shown = {k: v for k, v in metrics(result).items() if k not in repeated}
    return [*report.metric_sheets(config_json.to_plain(shown))]


def plot(ax: Any, result: Launches) -> None:
    """Draws what each part of a step launches, way beside way."""
    paths = list(dict.fromkeys(result.counts.path.tolist()))
    shown = ["layer", "forward", *PARTS, "other"]
    where, first = np.arange(len(shown)), list[int]()
    for nth, path in enumerate(paths):
        rows = result.counts.where(path=path)
        by_part = dict(zip(rows.part.tolist(), rows.launches.tolist(), strict=True))
        lengths = [by_part.get(part, 0) for part in shown]
        place = where + 0.86 * ((nth + 0.5) / len(paths) - 0.5)
        look = {"label": path} | systems.system_style(path).bar
        bars = ax.barh(place, lengths, 0.8 / len(paths), **look)
        # A number that is that of the first path is not repeated.
        first = first or lengths
        seen = [
            "" if nth and x == y else str(x)
            for x, y in zip(lengths, first, strict=True)
        ]
        ax.bar_label(bars, seen, padding=3)
    names = {"layer": "each layer", "forward": "around the layers"}
    ax.set_yticks(where, [names.get(x, x.replace("_", " ")) for x in shown])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    title = "Kernels that a step launches"
    if paths:
        ax.legend()
        names = ("step", "forward", "layer")
        num, around, layer = (result.per(name)[paths[0]] for name in names)
        title = f"A {paths[0]} step launches {num} kernels outside the model, {around} "
        title += f"around its layers and {layer} in each"
    style.set_labels(ax, title, "launches [kernels]", "")


@claims_file(__file__).judge
def claims(result: Launches) -> Iterator[Measurement]:
    """Holds the counts against the bars."""
    names = {"step": "cached"} if result.prefix_cache else {}
    for which in ("layer", "forward", "step"):
        for path, num in result.per(which).items():
            yield measured(names.get(which, which), num, path=path)
    captured = result.waits.captured
    yield measured("captured", int(np.sum(captured == 0)), num=len(captured))
    yield measured("weights", result.weight_copies)
    yield measured("pool", result.alias_bytes, published=result.pool_bytes)
    for row in result.compiled.where(layers=32).rows():
        yield measured("compile", row["wall_s"], cpu=f"{row['cpu_s']:.0f}")
