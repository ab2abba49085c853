"""Joint distribution of several tokens, for every drafter with every allowed verifier.

`test_verifiers.py` enumerates the rule of one step, whose noise is independent by
assumption. Here drafters keep their state, the noise is the engine's own, and strings
of four tokens are counted over many sequences.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import arrays, sampling
from jaxkv.engine import (
    Drafter,
    Drafts,
    EngineConfig,
    Speculation,
    drafting,
    init,
    model_runner,
)
from jaxkv.engine.emitting import verification
from jaxkv.memory import make_pages
from jaxkv.models import ForwardResult
from jaxkv.sampling import Sampling
from jaxkv.speculation import (
    Adaptive,
    DraftModel,
    Jacobi,
    Lookahead,
    NGram,
    Rejection,
    SharedNoiseVerifier,
    Synthetic,
    Typical,
    draws,
)
from jaxkv.speculation.adaptive import AdaptiveState, set_costs
from tests.support.engines import FAST_COMPILE
from tests.support.sampled_laws import chi_square, params_of

VOCAB = 4
PROMPT = (0, 2, 1, 3, 0)
NUM_TOKENS = 4
NUM = 1 << 13
"""Sequences, each a request of its own."""
RNG = np.random.default_rng(1)
TARGET, GUESS = RNG.normal(size=(2, VOCAB, VOCAB)).astype(np.float32)
"""Logits by the last token, of the model and of one that drafts."""


def guess(params: Any, pages: Any, rows: Any) -> ForwardResult:
    """The draft model."""
    logits = jnp.asarray(GUESS)[rows.token]
    return ForwardResult(logits[jnp.maximum(rows.logit_rows, 0)], pages)


@dataclasses.dataclass(frozen=True)
class Tree(Drafter):
    """Two guesses after the root, and two after the first of these."""

    is_drawn: bool
    """True if guesses are sampled from a distribution; False if they are chosen by the
    target's noise, as in `Medusa` and `Eagle`."""
    replacement: bool = False

    @property
    def width(self) -> int:
        return 2

    def propose(
        self, params: Any, memory: Any, state: Any, granted: Any, config: EngineConfig
    ) -> Any:
        row = jnp.maximum(state.slots.sequence, 0)
        num_tokens = state.slots.num_tokens
        last = arrays.take(
            state.sequences.tokens[row], (jnp.arange(NUM), num_tokens - 1), fill=0
        )
        request_params = jax.tree.map(lambda x: x[row], state.sequences.params)
        pairs = []
        laws = []
        for depth in range(2):
            logits = jnp.asarray(GUESS)[last]
            if self.is_drawn:
                pair, law = draws.draw_drafts(
                    logits,
                    request_params,
                    num_tokens + depth,
                    num=2,
                    replacement=self.replacement,
                )
                laws.append(law)
            else:
                ranked = draws.shared_noise_logits(
                    logits, request_params, num_tokens + depth
                )
                pair = sampling.candidates(ranked, 2)[1]
            pairs.append(pair)
            last = jnp.maximum(pair[:, 0], 0)
        law = None
        if laws:
            none = jnp.zeros_like(laws[0])
            law = jnp.stack([*laws, none, none, none], axis=1)
        parents = jnp.broadcast_to(jnp.asarray([0, 0, 1, 1], jnp.int32), (NUM, 4))
        tokens = jnp.concatenate(pairs, axis=1)
        return memory, state.pages, Drafts(granted, tokens, law, parents)


class Case(NamedTuple):
    """A drafter, its largest number of drafts, and a verifier if it is not the
    default."""

    drafter: Drafter
    max_drafts: int = 3
    num_draft_buckets: int = 1


CASES = {
    "n-gram": Case(NGram(1, 2)),
    "jacobi": Case(Jacobi()),
    "lookahead": Case(Lookahead(columns=2, ngram=2, candidates=2, entries=4), 4),
    "draft model": Case(DraftModel(guess, shares_noise=False)),
    "draft model, shared noise": Case(DraftModel(guess)),
    "adaptive": Case(
        Adaptive(DraftModel(guess, shares_noise=False), half_life=4.0), 4, 3
    ),
    "adaptive jacobi": Case(Adaptive(Jacobi(), half_life=4.0), 4, 3),
    "tree, chosen": Case(Tree(is_drawn=False), 4),
    "tree, drawn": Case(Tree(is_drawn=True), 4),
    "tree, drawn with replacement": Case(Tree(is_drawn=True, replacement=True), 4),
}
REFUSED = ("jacobi", "lookahead", "adaptive jacobi")
VERIFIERS = {
    "coupled": SharedNoiseVerifier(),
    "rejection": Rejection(),
    "with replacement": Rejection(replacement=True),
}


def answers(case: Case, verifier: Any) -> np.ndarray:
    """The first tokens of every sequence, [sequences, NUM_TOKENS]."""
    num = case.max_drafts
    config = EngineConfig(
        num_pages=1,
        page_size=32,
        max_slots=NUM,
        max_sequences=NUM,
        queue_capacity=1,
        max_length=32,
        token_budget=NUM,
        max_drafts=num,
        num_draft_buckets=case.num_draft_buckets,
        max_stop_tokens=1,
    )
    pages = make_pages(
        num_layers=1,
        num_pages=1,
        num_kv_heads=1,
        page_size=32,
        head_dim=1,
        dtype="float32",
    )
    # Bypasses the constructor, which refuses some pairs.
    pair = tuple.__new__(Speculation, (case.drafter, verifier))
    keys = params_of([Sampling(seed=seed) for seed in range(NUM)])

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def start() -> Any:
        memory = case.drafter.init(config)
        if isinstance(memory, AdaptiveState):  # most drafts pay at these costs
            lengths = memory.lengths.astype(jnp.float32)
            steps = jnp.broadcast_to(1 + 0.02 * lengths, memory.costs.steps.shape)
            costs = memory.costs._replace(steps=steps, undrafted=steps[:, 0])
            memory = set_costs(memory, costs)
        state = init(config, pages, memory)
        tokens = state.sequences.tokens.at[:, : len(PROMPT)].set(jnp.asarray(PROMPT))
        sequences = state.sequences._replace(
            tokens=tokens,
            params=keys,
            prompt_length=jnp.full((NUM,), len(PROMPT), jnp.int32),
            limit=jnp.full((NUM,), 32, jnp.int32),
        )
        slots = state.slots._replace(
            sequence=jnp.arange(NUM, dtype=jnp.int32),
            num_tokens=jnp.full((NUM,), len(PROMPT), jnp.int32),
        )
        return state._replace(sequences=sequences).with_slots(slots)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def step(state: Any, is_first: Any) -> Any:
        wanted = case.drafter.requested_draft_lengths(state.memory, state, config)
        granted = jnp.where(is_first, 0, jnp.minimum(wanted, num))
        s = state.sequences
        every = jnp.arange(NUM, dtype=jnp.int32)
        state, drafts = drafting.propose(None, state, granted, case.drafter, config)
        table = jnp.asarray(TARGET)
        num_tokens = state.slots.num_tokens
        last = arrays.take(s.tokens, (every, num_tokens - 1), fill=0)
        fed = model_runner.ModelOutput(
            logits=table[last],
            drafted=table[jnp.maximum(drafts.tokens, 0)],
            pages=state.pages,
            spare_sequence=jnp.zeros((0,), jnp.int32),
            spare_position=jnp.zeros((0,), jnp.int32),
        )
        everyone = jnp.ones((NUM,), bool)
        judged = verification.verify(state, fed, everyone, drafts, pair, None, config)
        index = jnp.arange(judged.tokens.shape[1], dtype=jnp.int32)[None, :]
        place = jnp.where(index < judged.num[:, None], num_tokens[:, None] + index, -1)
        s = state.sequences
        tokens = arrays.put(s.tokens, (every[:, None], place), judged.tokens)
        slots = state.slots._replace(num_tokens=num_tokens + judged.num)
        state = state._replace(sequences=s._replace(tokens=tokens)).with_slots(slots)
        memory = case.drafter.learn(state.memory, state, judged.verified)
        return state._replace(memory=memory)

    state = start()
    for index in range(NUM_TOKENS):
        state = step(state, jnp.asarray(index == 0))
    final_sequences = state.sequences
    assert int(state.slots.num_tokens.min()) >= len(PROMPT) + NUM_TOKENS
    # Several tokens per step; otherwise no draft was accepted.
    assert int(state.slots.num_tokens.max()) > len(PROMPT) + NUM_TOKENS
    return np.asarray(final_sequences.tokens)[:, len(PROMPT) : len(PROMPT) + NUM_TOKENS]


@functools.cache
def joint() -> np.ndarray:
    """The model's distribution of NUM_TOKENS tokens, enumerated."""
    law = np.exp(TARGET.astype(np.float64))
    law /= law.sum(axis=1, keepdims=True)
    probs = law[PROMPT[-1]]
    for _ in range(NUM_TOKENS - 1):
        probs = probs[..., None] * law
    return probs.ravel()


def fit(name: str, verifier: Any) -> float:
    """p-value of the answers under the model's distribution (chi-squared test)."""
    code = answers(CASES[name], verifier) @ VOCAB ** np.arange(NUM_TOKENS)[::-1]
    return chi_square(np.bincount(code, minlength=VOCAB**NUM_TOKENS), joint())


def pairs() -> list[Any]:
    """Every drafter with every verifier that keeps its distribution."""
    cases = []
    for name in CASES:
        for verifier in VERIFIERS:
            if verifier != "coupled" and name in REFUSED:
                continue
            # `replacement` must match the drafter, see `Rejection`.
            if (
                verifier == "with replacement"
                and name != "tree, drawn with replacement"
            ):
                continue
            cases.append((name, verifier))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verifier"), pairs())
def test_an_allowed_pair_keeps_the_joint_distribution(name: str, verifier: str) -> None:
    assert fit(name, VERIFIERS[verifier]) > 1e-3


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        pytest.param("jacobi", "rejection", marks=pytest.mark.slow),
        pytest.param("lookahead", "rejection", marks=pytest.mark.slow),
        pytest.param("adaptive jacobi", "rejection", marks=pytest.mark.slow),
        pytest.param("tree, drawn", "with replacement", marks=pytest.mark.slow),
    ],
)
def test_a_pair_that_is_wrong_is_noticed(name: str, verifier: str) -> None:
    assert fit(name, VERIFIERS[verifier]) < 1e-9


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("verifier", ["rejection", "with replacement"])
def test_drafts_of_the_verifiers_own_draws_need_its_noise(
    name: str, verifier: str
) -> None:
    drafter = CASES[name].drafter
    judge = VERIFIERS[verifier]
    line = re.escape(f"verifier={judge} must share the sampler's noise")
    with pytest.raises(ValueError, match=line):
        Speculation(drafter, judge)
    with pytest.raises(ValueError, match=line):
        Speculation(NGram(), judge)._replace(drafter=drafter)
    # The remaining ones keep no distribution, or keep every token.
    for other in (SharedNoiseVerifier(), Typical(), Synthetic(0.5)):
        assert Speculation(drafter, other) == (drafter, other)
