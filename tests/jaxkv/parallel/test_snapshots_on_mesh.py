"""Snapshots of an engine on a mesh: restored there, on another mesh, on one device."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.engine import EngineState
from jaxkv.ledger import EVENTS
from jaxkv.parallel import make_mesh, place_state
from tests.support import engine_programs, engines
from tests.support.meshes import ASKS, PROMPTS, engine_on

BOUNDS: dict[str, Any] = {"num_pages": 30, "page_size": 8}
"""Enough pages to avoid swapping, which would need the host."""
NUM_CALLS = 40
"""Number of calls after which all requests are done."""


def make(**degrees: int) -> jaxkv.Engine:
    """Makes an engine of the small model, on a mesh if there are degrees."""
    mesh = make_mesh(**degrees) if degrees else None
    return engine_on(engines.MODEL, engines.params(), mesh, **BOUNDS)


def make_partial_state(engine: jaxkv.Engine) -> EngineState:
    """Returns the state while requests are in prefill, in decode and in the queue."""
    for prompt, ask in zip(PROMPTS, ASKS, strict=True):
        engine.submit(prompt, ask)
    engine.step()
    engine.read(engine.unread[0])
    return engine.state


def go_on(engine: jaxkv.Engine, state: EngineState) -> tuple[EngineState, list[Any]]:
    """Continues a state with an engine's programs; returns state and step results."""
    emitted = []
    for call in range(NUM_CALLS):
        state, info = engine.run_steps(state, 1.0 + call)
        emitted.append(jax.tree.map(np.asarray, info))
    return state, emitted


def like(engine: jaxkv.Engine) -> Any:
    """Returns the shapes of the engine's pages."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), engine.state.pages
    )


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [{"tensor": 2, "context": 2}, pytest.param({"context": 4}, marks=pytest.mark.slow)],
    ids=["tp cp", "cp"],
)
def test_state_continues_on_other_layouts(
    degrees: dict[str, int], tmp_path: Path
) -> None:
    engine = make(**degrees)
    alone = make()
    state = make_partial_state(engine)
    jaxkv.save_state(tmp_path / "saved", state, engine.config)

    def load() -> EngineState:
        return jaxkv.load_state(tmp_path / "saved", engine.config, like(alone))

    # Bit for bit the same, whole, and on the mesh as it was.
    loaded_state = load()
    assert_equal(
        jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, loaded_state)
    )
    placed = place_state(loaded_state, make_mesh(**degrees))
    for placed_leaf, its in zip(
        jax.tree.leaves(placed), jax.tree.leaves(state), strict=True
    ):
        assert placed_leaf.sharding.is_equivalent_to(its.sharding, placed_leaf.ndim)
    end, emitted = go_on(engine, state)
    assert sum(int(x.num_emitted.sum()) for x in emitted) > 10
    assert not engines.unfinished(end).any()
    finish_s = EVENTS.read(np.asarray(end.ledger.events), "finish_s")
    assert (finish_s > 0).sum() >= len(ASKS)
    assert_equal(go_on(engine, placed)[1], emitted)
    # On one device, equal tokens of every sequence.
    continuation, _ = go_on(alone, load())
    assert_equal(continuation.sequences.tokens, end.sequences.tokens)


def test_states_that_cannot_be_saved_or_divided_are_refused(tmp_path: Path) -> None:
    """Uses shapes only: pages of 16 places, two KV heads."""
    _, (_, state, _), _ = engine_programs.steps(engine_programs.SMALL)

    class Elsewhere:
        is_fully_addressable = False

    elsewhere = state._replace(pool=Elsewhere())
    with pytest.raises(ValueError, match="on devices of other processes; only an eng"):
        jaxkv.save_state(tmp_path / "saved", elsewhere, engine_programs.CONFIG)
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ValueError, match="of 2 KV heads cannot be divided over 4 dev"):
        place_state(state, make_mesh(tensor=4))
    with pytest.raises(
        ValueError, match="page_size=16 must be a multiple of the 3 dev"
    ):
        place_state(state, make_mesh(context=3))
