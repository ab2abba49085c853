"""How many kernels does an engine step launch on a GPU, and which loops need the host?

The program of `run_steps` is compiled for an H200 without the device, with the options
of the engine. The compiler's plan gives the launches of a step by path through its
loops and branches and by part of the step, the loops and branches outside CUDA graphs,
for which the host must read a value, and copies of weights. The time of a launch or of
a graph can only be measured on a device.
"""

import functools
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from experiments import lab
from jaxkv import scheduling
from jaxkv.engine import EngineConfig, init, run_steps
from jaxkv.models import (
    ModelConfig,
    PagedForward,
    Params,
    make_model_pages,
    param_shapes,
)
from pallas_kernels import devices
from pallas_kernels.bench import (
    LOOPS,
    Route,
    Thunk,
    compile_function,
    executed_launches,
    load_compiler,
    read_plan,
    unavailable_reason,
    walk_thunks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGET_DEVICE = "NVIDIA H200"
STEP_PARTS = tuple("counts schedule apply_plan pack advance emit retire info".split())
"""Named scopes of a step, except the forward pass."""
_GREEDY = {"decode": 1, "draw": 1}
_SAMPLED = {**_GREEDY, "asked": 1, "sampled": 1, "cut": 1, "whole_mass": 1}
ROUTES = (
    Route("greedy", _GREEDY),
    Route("sampled", _SAMPLED),
    Route("mixed", {"mixed": 1, "draw": 1}),
)
"""Paths through a step. Greedy: every slot decodes and takes the largest logit.
Sampled: every slot draws under top-k and top-p, decided by the best tokens. Mixed: some
slots run prefill. No other events occur."""
FILLING = Route("filling", {**_GREEDY, "enter": 1})
"""Like greedy, with slots that fill a page, which enters the prefix cache. Every loop
is counted, so the count is an upper bound."""


class Config(lab.ConfigRecord):
    """A dense Llama in bfloat16, and its engine."""

    hidden_size: int = 4096
    """Features of a row."""
    mlp_size: int = 14336
    """Width of the MLP."""
    num_q_heads: int = 32
    """Query heads."""
    num_kv_heads: int = 8
    """KV heads, a divisor of the query heads."""
    head_dim: int = 128
    """Head size: 64, 128 or 256, as the kernels support."""
    vocab_size: int = 128_256
    """Vocabulary size."""
    num_layers: lab.Sizes = (2, 8, 32)
    """Depths to compile, each at least 1; launches are counted at the first one."""
    scanned: bool = False
    """Scan over stacked layers."""
    max_slots: lab.PositiveInt = 32
    """Sequences that run concurrently."""
    token_budget: int = 256
    """Rows of a step."""
    max_length: int = 2048
    """Tokens of a sequence."""
    prefix_cache: bool = False
    """Enable the prefix cache."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.head_dim not in (64, 128, 256):
            raise ValueError(f"head_dim={self.head_dim!r} must be 64, 128 or 256")
        for depth in self.num_layers:
            self.model(depth)
        self.engine()

    def model(self, num_layers: int) -> ModelConfig:
        """Returns the model config with `num_layers` layers."""
        names = ("vocab_size", "hidden_size", "mlp_size", "head_dim")
        names += ("num_q_heads", "num_kv_heads")
        return ModelConfig(
            **{name: getattr(self, name) for name in names},
            num_layers=num_layers,
            max_positions=self.max_length,
            tie_embeddings=False,
        )

    def engine(self) -> EngineConfig:
        """Returns the engine config, with pages for every slot's longest sequence."""
        return EngineConfig(
            page_size=16,
            num_pages=self.max_slots * -(-self.max_length // 16),
            max_slots=self.max_slots,
            max_length=self.max_length,
            token_budget=self.token_budget,
            prefix_cache=self.prefix_cache,
        )


_SMALL_MODEL: dict[str, Any] = dict(
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
    "smoke": Config(**_SMALL_MODEL),
}


"""Size with room for a number above each bar."""


class LaunchCounts(lab.ResultTable):
    """Launches of a step by path and part."""

    path: lab.Texts = lab.column("path through the step")
    part: lab.Texts = lab.column("part of the step")
    launches: lab.Ints = lab.column(
        "kernels, products and copies; for layers, of one layer"
    )


class DataDependentLoops(lab.ResultTable):
    """Loops and branches whose condition is computed on the device."""

    path: lab.Texts = lab.column("named scopes around the loop or branch")
    kind: lab.Texts = lab.column("`While` or `Conditional`")
    captured: lab.Ints = lab.column(
        "1 in a CUDA graph, 0 if the host reads the condition"
    )


class CompileTimes(lab.ResultTable):
    """Compile times by depth."""

    layers: lab.Ints = lab.column("number of layers")
    cpu_s: lab.Floats = lab.column("processor time of all threads", form="{:.1f}")
    wall_s: lab.Floats = lab.column("wall-clock time", form="{:.1f}")


class Launches(lab.ResultRecord):
    """Launches of one step of the engine."""

    counts: LaunchCounts
    waits: DataDependentLoops
    compiled: CompileTimes
    prefix_cache: bool = lab.column("True if the engine has a prefix cache")
    weight_copies: int = lab.column("copies of arrays with the shape of a weight")
    pool_bytes: int = lab.column("bytes of K and V")
    alias_bytes: int = lab.column("bytes of results that alias arguments")

    def per(self, which: str) -> dict[str, int]:
        """Returns the launches of a `layer`, of the `forward` pass, or of the `step`.

        The forward pass excludes its layers, and the step excludes its forward pass.
        """
        totals = dict.fromkeys(self.counts.distinct("path"), 0)
        for row in self.counts.rows():
            if which == (
                row["part"] if row["part"] in ("layer", "forward") else "step"
            ):
                totals[row["path"]] += row["launches"]
        return totals


def prepare() -> None:
    """Makes JAX load the GPU compiler, before it initializes its devices."""
    load_compiler()


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Launches:
    """Compiles every depth; a stopped run has the completed ones."""
    prepare()
    if (reason := unavailable_reason()) is not None:
        raise ValueError(f"cannot compile for an H200: {reason}")
    counts = LaunchCounts.of([])
    waits = DataDependentLoops.of([])
    compiled = []
    memory_sizes = (0, 0, 0)
    cached = config.prefix_cache
    for depth in progress.track(config.num_layers, "compiling", "depths"):
        with tempfile.TemporaryDirectory() as folder:
            program, arguments, pool = _program(config, depth)
            cpu_s = time.process_time()
            wall_s = time.perf_counter()
            compiler_report = compile_function(
                program,
                *arguments,
                donate_argnums=1,
                options={**devices.COMPILER_OPTIONS, "xla_dump_to": folder},
            )
            cpu_s = time.process_time() - cpu_s
            wall_s = time.perf_counter() - wall_s
            compiled.append((depth, cpu_s, wall_s))
            if len(counts):
                continue
            plan = read_plan(Path(folder))
        copies = weight_copies(compiler_report.text, arguments[0])
        memory_sizes = copies, pool, compiler_report.alias_bytes
        routes = (*ROUTES, FILLING) if cached else ROUTES
        counts = count_launches(plan, 1 if config.scanned else depth, routes)
        loops = [
            (thunk, inside)
            for thunk, inside in walk_thunks(plan)
            if thunk.kind in LOOPS and thunk.trips is None
        ]
        waits = DataDependentLoops.of(
            (scope_of(x), x.kind, any(y.kind == "CommandBuffer" for y in inside))
            for x, inside in loops
        )
    return Launches(counts, waits, CompileTimes.of(compiled), cached, *memory_sizes)


def _program(
    config: Config, depth: int
) -> tuple[Callable[..., object], tuple[PyTree[jax.ShapeDtypeStruct], ...], int]:
    """Returns `run_steps`, the shapes of its arguments, and the bytes of K and V."""
    model = config.model(depth)
    engine = config.engine()
    pages = jax.eval_shape(lambda: make_model_pages(model, engine, dtype="bfloat16"))
    params = param_shapes(model, dtype="bfloat16", stacked=config.scanned)
    program = functools.partial(
        run_steps,
        config=engine,
        forward=PagedForward(model),
        policy=scheduling.fcfs(),
    )
    state = jax.eval_shape(functools.partial(init, engine), pages)
    clock = jax.ShapeDtypeStruct((2,), jnp.int32)
    pool = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    return program, (params, state, clock), pool


def count_launches(
    plan: list[Thunk], num_layers: int, routes: Sequence[Route] = ROUTES
) -> LaunchCounts:
    """Counts the launches of a step by path and part; for layers, those of one."""
    rows = []
    [steps] = [x for x in plan if x.kind == "While" and x.trips is not None]
    for route in routes:
        part_counts: dict[str, int] = dict.fromkeys(
            ("layer", "forward", *STEP_PARTS, "other"), 0
        )
        chosen = _Quiet(route.name, route.choices)
        for thunk, times, inside in executed_launches([steps], chosen):
            part_counts[_part(thunk, inside)] += times
        part_counts["layer"] = -(-part_counts["layer"] // num_layers)
        rows += [(route.name, part, num) for part, num in part_counts.items()]
    return LaunchCounts.of(rows)


class _Quiet(Route):
    """A path on which all unnamed events are absent."""

    def choice(self, thunk: Thunk) -> int:
        return self.choices.get(scope_of(thunk).rpartition("/")[2], 0)


def _part(thunk: Thunk, inside: tuple[Thunk, ...]) -> str:
    """Returns the part of the step that a thunk belongs to.

    A thunk without a name belongs to the part of its loop.
    """
    scopes = "/".join(x.scope for x in (*inside, thunk)).split("/")
    if "layer" in thunk.scope.split("/") or "layers" in scopes:
        return "layer"
    # Packing is inside the scope of the forward pass, but not part of the model.
    if part := next((part for part in STEP_PARTS if part in scopes), None):
        return part
    return "forward" if "decode" in scopes or "mixed" in scopes else "other"


def scope_of(thunk: Thunk) -> str:
    """Returns the named scopes around a thunk, without those of JAX and XLA."""
    strange = r"jit\(.*\)|while|cond|body|closed_call|eval_jaxpr|branch_\d+_fun"
    names = [x for x in thunk.scope.split("/") if not re.fullmatch(strange, x)]
    return "/".join(names)


def weight_copies(text: str, params: Params) -> int:
    """Counts copies of arrays of a weight's shape in an optimized program."""
    weights = {
        f"bf16[{','.join(map(str, x.shape[lead:]))}]"
        for x in jax.tree.leaves(params)
        for lead in (0, 1)
        if x.ndim - lead > 1
    }
    copies = re.findall(r"= (\w+\[[\d,]+\])\S* copy\(", text)
    return sum(shape in weights for shape in copies)


def metrics(result: Launches) -> dict[str, Any]:
    """Returns the counts by path, for JSON."""
    parts: dict[str, dict[str, int]] = {}
    for row in result.counts.rows():
        parts.setdefault(row["path"], {})[row["part"]] = row["launches"]
    other_parts = {
        path: {x: counts[x] for x in counts if x not in ("layer", "forward")}
        for path, counts in parts.items()
    }
    for path, num in result.per("step").items():
        parts[path]["step"] = num
    return {
        "target": TARGET_DEVICE,
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


def summary(result: Launches) -> list[lab.Sheet]:
    """Tabulates the counts."""
    repeated = ("per_layer", "per_forward", "per_step", "parts", "compile_s")
    shown = {k: v for k, v in metrics(result).items() if k not in repeated}
    return [*lab.metric_sheets(lab.to_plain(shown))]


def plot(ax: "Axes", result: Launches) -> None:
    """Draws the launches of each part of a step, grouped by path."""
    paths = list(dict.fromkeys(result.counts.path.tolist()))
    shown = ["layer", "forward", *STEP_PARTS, "other"]
    where = np.arange(len(shown))
    first = list[int]()
    for nth, path in enumerate(paths):
        rows = result.counts.where(path=path)
        by_part = dict(zip(rows.part.tolist(), rows.launches.tolist(), strict=True))
        lengths = [by_part.get(part, 0) for part in shown]
        place = where + 0.86 * ((nth + 0.5) / len(paths) - 0.5)
        look = {"label": path} | lab.system_style(path).bar
        bars = ax.barh(place, lengths, 0.8 / len(paths), **look)
        # Counts equal to those of the first path are not repeated.
        first = first or lengths
        labels = [
            "" if nth and x == y else str(x)
            for x, y in zip(lengths, first, strict=True)
        ]
        ax.bar_label(bars, labels, padding=3)
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
    lab.set_labels(ax, title, "launches [kernels]", "")


@lab.claims_file(__file__).judge
def claims(result: Launches) -> Iterator[lab.MeasuredValue]:
    """Compares the counts with the bars."""
    names = {"step": "cached"} if result.prefix_cache else {}
    for which in ("layer", "forward", "step"):
        for path, num in result.per(which).items():
            yield lab.measured(names.get(which, which), num, path=path)
    captured = result.waits.captured
    yield lab.measured("captured", int(np.sum(captured == 0)), num=len(captured))
    yield lab.measured("weights", result.weight_copies)
    yield lab.measured("pool", result.alias_bytes, published=result.pool_bytes)
    for row in result.compiled.where(layers=32).rows():
        yield lab.measured("compile", row["wall_s"], cpu=f"{row['cpu_s']:.0f}")


STUDY = lab.Study(
    CONFIGS,
    Launches,
    run,
    plot,
    claims,
    summary,
    metrics,
    panels=lab.Panels(1, 1, 6.0),
    prepare=prepare,
)
