"""Jacobi guesses against algorithm 1 of Santilli et al. 2023, evaluated in Python."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import VerifyOutput
from jaxkv.speculation import Jacobi
from tests.support import engines, mutation
from tests.support.engines import TIGHT
from tests.support.mutation import Bug

NUM_DRAFTS = 9
SEQUENCES = 3
NO_SEQUENCE = -1


def next_token(context: list[int]) -> int:
    """A model whose token depends on the position, the last token, and older ones."""
    old = sum(context[:-2]) % 5 == 0
    return (5 * len(context) + 3 * (context[-1] % 4 == 0) + 7 * old) % 23


def iterate(prompt: list[int]) -> list[list[int]]:
    """Guesses of every iteration until the fixed point, for a block of all drafts."""
    guesses = [[0] * NUM_DRAFTS]
    while len(guesses) < 2 or guesses[-1] != guesses[-2]:
        last = guesses[-1]
        guesses.append([next_token(prompt + last[:i]) for i in range(NUM_DRAFTS)])
    return guesses


class Sequence:
    """A decoding sequence: its tokens, and the model's outputs for a step's drafts."""

    def __init__(self, prompt: list[int]):
        self.prompt = prompt
        self.known = prompt
        self.guesses = [0] * NUM_DRAFTS

    def step(self, drafts: list[int]) -> tuple[int, list[int]]:
        follows = [next_token(self.known + drafts[:i]) for i in range(NUM_DRAFTS + 1)]
        wrong = [a != b for a, b in zip(drafts, follows, strict=False)]
        accepted = [*wrong, True].index(True)
        self.known = self.known + follows[: accepted + 1]
        # Places without an evaluated equation repeat the last output.
        said = follows[accepted + 1 :] + [follows[-1]] * NUM_DRAFTS
        self.guesses = said[:NUM_DRAFTS]
        return accepted, follows


def verified(rows: list[tuple[int, list[int]] | None]) -> VerifyOutput:
    """Result of verification for all slots; None for a slot without a sampled token."""
    filled_rows = [row or (0, [1] * (NUM_DRAFTS + 1)) for row in rows]
    return VerifyOutput(
        num_drafts=jnp.full(len(rows), NUM_DRAFTS, jnp.int32),
        accepted=jnp.asarray([accepted for accepted, _ in filled_rows], jnp.int32),
        path=jnp.zeros((len(rows), NUM_DRAFTS), jnp.int32),
        follows=jnp.asarray([follows for _, follows in filled_rows], jnp.int32),
        emits=jnp.asarray([row is not None for row in rows]),
    )


def test_its_guesses_are_the_iterations_of_the_algorithm() -> None:
    """For any slot of a sequence, and with slots that sample no token.

    Each step fixes at least one token, so a block takes no more steps than it has
    tokens.
    """
    rng = np.random.default_rng(0)
    drafter = Jacobi()
    config = dataclasses.replace(TIGHT, max_drafts=NUM_DRAFTS, token_budget=90)
    idle = engines.start(config)
    everyone = [Sequence(rng.integers(0, 23, 4).tolist()) for _ in range(SEQUENCES)]
    wanted = [iterate(request.prompt) for request in everyone]
    memory = drafter.init(config)
    taken = [0] * SEQUENCES
    for _ in range(3 * NUM_DRAFTS):
        slots = rng.permutation([*range(SEQUENCES), NO_SEQUENCE])
        held = idle.slots._replace(sequence=jnp.asarray(slots, jnp.int32))
        state = idle.with_slots(held)
        granted = jnp.full(len(slots), NUM_DRAFTS, jnp.int32)
        memory, _, drafts = drafter.propose(None, memory, state, granted, config)
        rows: list[Any] = [None] * len(slots)
        for slot, sequence in enumerate(slots):
            if sequence != NO_SEQUENCE and rng.random() < 0.7:
                rows[slot] = everyone[sequence].step(drafts.tokens[slot].tolist())
                taken[sequence] += 1
        memory = drafter.learn(memory, state, verified(rows))
        for sequence, request in enumerate(everyone):
            new = request.known[len(request.prompt) :]
            assert len(new) >= min(taken[sequence], NUM_DRAFTS)
            assert memory.tokens[sequence].tolist() == request.guesses
            block = (new + request.guesses)[:NUM_DRAFTS]
            assert (
                block
                == wanted[sequence][min(taken[sequence], len(wanted[sequence]) - 1)]
            )
    assert all(len(iterations) - 2 <= NUM_DRAFTS for iterations in wanted)
    # Several tokens per step; otherwise the order of iterations would not matter.
    assert min(len(iterations) - 2 for iterations in wanted) < NUM_DRAFTS
    assert min(taken) > NUM_DRAFTS


BUGS = {
    "guesses that were judged are judged again": ("+ 1 + index", "+ index"),
    "a guess is left out": ("+ 1 + index", "+ 2 + index"),
    "the last equation is ignored": (
        "v.num_drafts[:, None]",
        "v.num_drafts[:, None] - 1",
    ),
    "a slot without a sampled token learns": ("v.emits,", "v.emits | True,"),
    "the slot's memory, not the sequence's": (
        "v.emits, state.slots.sequence",
        "v.emits, jnp.arange(v.emits.size)",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_iteration_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check = test_its_guesses_are_the_iterations_of_the_algorithm
    mutation.assert_noticed(monkeypatch, Bug(Jacobi, "learn", *BUGS[name], check))
