"""Records the experts of a sequence's tokens when it leaves its slot.

The pages have the experts of each token with its K and V, so that those of a prefix
which another request computed are there, too. They are copied to the sequence's row
before its pages are released. If routes are not recorded, nothing changes.

Source: rollout routing replay (R3), Ma et al. 2025, arXiv:2510.11370; `routed_experts`
of SGLang and vLLM.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxkv import arrays
from jaxkv.engine.state import EngineState
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.memory import read_routes
from jaxkv.models import NO_EXPERT


def record_routes(state: EngineState, leaves: Bool[Array, " slots"]) -> EngineState:
    """Copies the experts of the tokens in marked slots to the sequences' rows."""
    if state.routes is None:
        return state

    def copy_routes(state: EngineState, leaves: Bool[Array, " slots"]) -> EngineState:
        stored = state.routes
        assert stored is not None
        length = stored.shape[1]
        routes = read_routes(state.pages, state.table.page_ids)[:, :length]
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        is_fed = place < state.table.length[:, None]
        routes = jnp.where(is_fed[:, :, None, None], routes, NO_EXPERT)
        row = jnp.where(leaves, state.slots.sequence, NO_SEQUENCE)
        return state._replace(routes=arrays.put(stored, row, routes))

    return arrays.update_if(jnp.any(leaves), copy_routes, state, leaves)
