"""Stop conditions of several tokens in one step, and the width of verified drafts."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine.drafting import Drafts, VerifyOutput
from jaxkv.engine.emitting import sampling_step, verification
from jaxkv.engine.emitting.verification import Continuation
from jaxkv.engine.state import FINISH_REASONS
from tests.support import engines

CONFIG = dataclasses.replace(
    engines.SERVED, max_slots=4, max_drafts=4, num_draft_buckets=2, token_budget=40
)


def test_tokens_end_at_the_first_stop_condition() -> None:
    """A stop token, the limit, neither, and a slot that does not emit."""
    state = engines.start(CONFIG)
    width = CONFIG.emit_width
    s = state.sequences
    s = s._replace(
        limit=s.limit.at[:4].set(jnp.asarray([60, 23, 60, 60])),
        stop_tokens=s.stop_tokens.at[:4].set(7),
    )
    slots = state.slots._replace(
        sequence=jnp.arange(4, dtype=jnp.int32), num_tokens=jnp.full(4, 20, jnp.int32)
    )
    tokens = np.tile(np.arange(5, 5 + width, dtype=np.int32), (4, 1))
    tokens[1:] += 10
    candidates = sampling_step._Candidates(
        tokens=jnp.asarray(tokens.reshape(-1)),
        logprobs=jnp.zeros(4 * width),
        num=jnp.asarray([5, 5, 2, 5], jnp.int32),
        invalid=jnp.zeros(4, bool),
        keep_logprobs=jnp.zeros(4 * width, bool),
        logits=lambda: jnp.zeros((4 * width, 3)),
    )
    emits = jnp.asarray([True, True, True, False])
    state, output = sampling_step._append_tokens(
        state._replace(sequences=s).with_slots(slots), candidates, emits
    )
    assert output.num_emitted.tolist() == [3, 3, 2, 0]
    assert state.slots.num_tokens.tolist() == [23, 23, 22, 20]
    reasons = [FINISH_REASONS[i] for i in output.reason.tolist()]
    assert reasons[0] != reasons[1]
    assert reasons[2] == reasons[3]
    for slot, num in enumerate([3, 3, 2, 0]):
        written = state.sequences.tokens[slot, 20 : 20 + num]
        assert written.tolist() == tokens[slot, :num].tolist()


@pytest.mark.parametrize(("num", "length"), [(0, 0), (1, 2), (2, 2), (3, 4)])
def test_results_of_few_drafts_come_first(
    num: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(state: Any, result: Any, emits: Any, drafts: Drafts, *_: Any) -> Any:
        size = drafts.tokens.shape[1]
        blank = jnp.zeros(4, jnp.int32)
        places = jnp.tile(1 + jnp.arange(1 + size, dtype=jnp.int32), (4, 1))
        path = places[:, :size]
        verified = VerifyOutput(drafts.num, blank, path, places, emits)
        return Continuation(places, blank, blank > 0, verified)

    monkeypatch.setattr(verification, "_judge", judge)
    drafts = Drafts(
        jnp.asarray([num, 0, 4, 0], jnp.int32), jnp.zeros((4, 4), jnp.int32)
    )
    emits = jnp.asarray([True, True, False, False])
    other: Any = None
    judged = verification.verify(other, other, emits, drafts, other, other, CONFIG)
    places = np.arange(1, 1 + CONFIG.emit_width)
    path = np.where(places <= length, places, 0)[: CONFIG.max_drafts]
    tokens = np.where(places <= 1 + length, places, 0)
    for slot in range(4):
        assert judged.verified.path[slot].tolist() == path.tolist()
        assert judged.verified.follows[slot].tolist() == tokens.tolist()
        assert judged.tokens[slot].tolist() == tokens.tolist()
