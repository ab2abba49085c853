"""Is every kernel right? Each shape, and each feature of attention, against references.

A shape is held against float64, as `bench kernels` does before it times; a feature
against the reference on the same numbers in float32; what `twins` has against formulas.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.device import twins
from experiments.bench.kernels import MAX_ERROR, runs
from pallas_kernels import devices, quantizing
from pallas_kernels.bench import GroupedSpec, Problem, Spec, problems, sets
from pallas_kernels.paged_attention import api

MAX_8_BIT_ERROR = 2e-2
"""Of answers in 16 bits, from pages of 8: both sides read the same numbers."""


def shapes(size: str) -> dict[str, Spec | GroupedSpec]:
    """The shapes to check by name: those of the set quick, or tiny ones."""
    return {x.name: x for x in sets.SETS["quick" if size == "gpu" else "tiny"]}


FEATURES: dict[str, Callable[[Problem], dict[str, Any]]] = {
    "window": lambda problem: {"window": 100},
    "softcap": lambda problem: {"softcap": 20.0},
    "alibi": lambda problem: {"alibi": _of_heads(problem, -0.01)},
    "sinks": lambda problem: {"sinks": _of_heads(problem, 1.0)},
    "int8": lambda problem: {},
    "fp8": lambda problem: {},
}
"""What attention can do beside: options by name; 8-bit pages have none."""


def names(size: str) -> list[str]:
    """All that is checked."""
    kinds = ("decode", "chunk", "tree")
    features = (f"{x}-{kind}" for x in FEATURES for kind in kinds)
    return [*shapes(size), *features, *twins.CHECKS]


def check(size: str, name: str) -> dict[str, Any]:
    """Errors of all of our implementations, and whether each is small enough.

    Returns:
      By implementation `error` and `right`, or a `note` that says why it has none.
    """
    if name in twins.CHECKS:
        return {"implementations": twins.check(size, name)}
    feature, _, kind = name.partition("-")
    if feature in FEATURES:
        return {"implementations": [_check_feature(size, feature, kind)]}
    spec = shapes(size)[name]
    problem = problems.of(spec, num_turns=1)
    ours = {x.name: x.prepare for x in runs.of(spec) if not x.is_peer}
    most = MAX_ERROR[spec.dtype]
    rows = twins.judged(ours, lambda x: float(ours[x](problem).error()), most)
    return {"implementations": rows}


def _check_feature(size: str, feature: str, kind: str) -> dict[str, Any]:
    """The best implementation of here against the reference in float32."""
    sizes: dict[str, Any] = {
        "batch": 3,
        "context": 300,
        "lengths": "uniform",
        "dtype": "bfloat16",
    }
    if size != "gpu":
        sizes |= {"heads": sets.specs.TINY, "page_size": 8, "dtype": "float32"}
    rows = {"decode": 1, "chunk": 40, "tree": 8}[kind]
    kinds: dict[str, Any] = {"kind": kind, "rows": rows}
    problem = problems.make(Spec(**kinds, **sizes), num_turns=1)
    options = FEATURES[feature](problem)
    pages = problem.k_pages, problem.v_pages
    if kind == "tree":
        options |= {"context": problem.context, "ancestors": problem.ancestors}
    if feature in ("int8", "fp8"):
        pairs = [quantizing.quantize(x, feature) for x in pages]
        pages, scales = zip(*pairs, strict=True)
        options |= {"k_scales": scales[0], "v_scales": scales[1]}
    elif feature == "window":
        # Places between two windows must hold numbers there.
        pages = tuple(jnp.nan_to_num(x) for x in pages)
    where: Any = problem.page_ids[0], problem.positions, problem.slots

    def attend(q: jax.Array, pages: Any, implementation: Any) -> np.ndarray:
        def call(q: jax.Array, pages: Any) -> jax.Array:
            return api.paged_attention(
                q, *pages, *where, **options, implementation=implementation
            ).out

        return np.asarray(jax.jit(call)(q, pages), np.float64)

    wide = pages if feature in ("int8", "fp8") else [x.astype("float32") for x in pages]
    right = attend(problem.q.astype("float32"), wide, "reference")
    name = "mosaic_gpu" if devices.current().platform == "gpu" else "reference"
    row = {"implementation": name}
    try:
        found = attend(problem.q, pages, name)
    except ValueError as error:
        return row | {"note": str(error).split("\n")[0][:200]}
    error = float(np.linalg.norm(found - right) / np.linalg.norm(right))
    dtype = problem.spec.dtype
    most = MAX_8_BIT_ERROR if feature in ("int8", "fp8") else MAX_ERROR[dtype]
    return row | {"error": error, "right": bool(error <= most)}


def _of_heads(problem: Problem, scale: float) -> jax.Array:
    num = problem.q.shape[1]
    return scale * jnp.arange(1, num + 1, dtype=jnp.float32) / num
