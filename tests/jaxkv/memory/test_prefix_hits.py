"""Hits, insertions and evictions of the prefix cache equal those of a model.

The forward pass sums the tokens on a sequence's pages, so a request that starts on
pages of other tokens gives another answer.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import arrays, clock, engine, memory, scheduling
from jaxkv.engine import EngineConfig, EngineState, init
from jaxkv.memory import Pages, Rows
from jaxkv.memory.page_pool import NO_PAGE
from jaxkv.memory.prefixes import prefix_cache, prefix_eviction
from jaxkv.memory.prefixes.prefix_cache import PrefixCache
from jaxkv.models import ForwardResult
from jaxkv.sampling import Sampling
from tests.support import engines, traces
from tests.support.engines import Ask, Outcome
from tests.support.hit_model import HitModel
from tests.support.mutation import replace

VOCAB = 61


@dataclasses.dataclass(frozen=True)
class Sum:
    """A model that writes tokens to pages; its next token is a sum over the pages."""

    def __call__(self, params: None, pages: Pages, rows: Rows) -> ForwardResult:
        token = rows.token.astype(pages.dtype)[:, None, None]
        pages = pages.layout.write(pages, 0, token, token, rows)
        every = jnp.arange(rows.token.shape[0], dtype=jnp.int32)
        slot = arrays.take(
            every if rows.slot is None else rows.slot, rows.logit_rows, fill=-1
        )
        position = arrays.take(rows.position, rows.logit_rows, fill=-1)
        ids = arrays.take(rows.page_ids, slot, fill=NO_PAGE)
        held = pages.layout.read(pages, 0, ids)[0][..., 0, 0]
        place = jnp.arange(held.shape[1], dtype=jnp.int32)[None, :]
        # Unwritten places hold NaN.
        held = jnp.where(place <= position[:, None], held, 0).astype(jnp.int32)
        total = jnp.sum(held * (place % 13 + 1), axis=1, dtype=jnp.int32)
        return ForwardResult(4 * jax.nn.one_hot(total % VOCAB, VOCAB), pages)


def continued(prompt: Sequence[int], num: int) -> list[int]:
    """Returns the answer that the sums give."""
    tokens = list(prompt)
    for _ in range(num):
        total = sum(token * (i % 13 + 1) for i, token in enumerate(tokens))
        tokens.append(total % VOCAB)
    return tokens[len(prompt) :]


def make_pages(config: EngineConfig) -> Pages:
    """Makes pages of NaN, which must never be read."""
    pages = memory.make_pages(
        num_layers=1,
        num_pages=config.num_pages,
        num_kv_heads=1,
        page_size=config.page_size,
        head_dim=1,
        dtype="float32",
    )
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)


class Replay(NamedTuple):
    """A served workload, each call of which the model has checked."""

    model: HitModel
    asks: dict[int, Ask]
    outcomes: dict[Any, Outcome]
    num_preempted: int


def serve(
    first: Sequence[Ask],
    config: EngineConfig,
    *,
    follow: Callable[[Outcome, Ask], Ask | None] = lambda outcome, ask: None,
    before_call: Callable[[EngineState], EngineState] = lambda state: state,
    program: Callable = engines.run_steps,
    chunk_size: int | None = None,
    cancels: float = 0.0,
) -> Replay:
    """Serves requests and their follow-ups, and checks each call with the model.

    Args:
      first: the requests, in order of arrival.
      config: the engine's bounds.
      follow: makes a follow-up of the first answer to a request, or None.
      before_call: changes the state before each call.
      program: the steps, compiled.
      chunk_size: as in `fcfs`.
      cancels: probability per call that a request is cancelled.
    """
    rng = np.random.default_rng(3)
    model = HitModel(config)
    waiting = list(first)
    state = init(config, make_pages(config))
    policy = scheduling.fcfs(chunk_size=chunk_size)
    asks = {ask.request_id: ask for ask in first}
    outcomes: dict[Any, Outcome] = {}
    num_preempted = 0
    while running := asks.keys() - outcomes.keys():
        if waiting:
            batch = engines.batch_of(waiting, config)
            requests = engines.requests_of(batch, config)
            state, taken = engines.submit(state, requests, config=config)
            begun = int((np.asarray(taken) & (requests.params.sample == 0)).sum())
            for ask in waiting[:begun]:
                model.submit(ask)
            waiting = waiting[begun:]
        state, info = program(
            None,
            before_call(state),
            clock.from_seconds(0),
            config=config,
            forward=Sum(),
            policy=policy,
        )
        info = jax.tree.map(np.asarray, info)
        num_preempted += int(info.num_preempted.sum())
        model.replay(info)
        if rng.random() < cancels:
            name = int(rng.choice(sorted(running)))
            state = engines.cancel(state, np.array([name], np.int32))
            model.cancel(name)
        model.check(state)
        state, sequences = engines.drain(state)
        ended = engines.outcomes_of(sequences)
        assert ended or waiting or info.num_rows.any(), "stuck"
        outcomes |= ended
        for name, outcome in ended.items():
            ask = asks[name if isinstance(name, int) else name[0]]
            if ask.sampling.temperature == 0:
                answer = continued(ask.prompt, len(outcome.tokens))
                assert outcome.tokens == answer
            if isinstance(name, int):
                assert outcome.num_cached == model.num_cached[name]
                if (ask := follow(outcome, ask)) is not None:
                    asks[ask.request_id] = ask
                    waiting.append(ask)
    engines.assert_empty(state)
    assert model.num_entered - model.num_evicted == len(model.page_of)
    return Replay(model, asks, outcomes, num_preempted)


# A trace, scaled down: an id represents 512 tokens, which become one or two pages.

CHUNK = 512


def scaled(share: int, *, num_tokens: int, max_length: int) -> list[Ask]:
    """Returns every `share`-th conversation of the trace, `num_tokens` per 512 tokens.

    Conversations are distinguished by their first id. With fewer of them, a prefix is
    used again sooner, as a small pool needs it.
    """
    asks = []
    path = traces.find("traces/mooncake_synthetic.jsonl")
    for name, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        if row["hash_ids"][0] % share == 0:
            num = max(1, round(row["output_length"] * num_tokens / CHUNK))
            tokens = [t for id_ in row["hash_ids"] for t in chunk(id_, num_tokens)]
            end = min(-(-row["input_length"] * num_tokens // CHUNK), max_length - num)
            wish = Sampling.greedy(max_tokens=num)
            asks.append(Ask(name, tokens[:end], wish))
    return asks


def chunk(hash_id: int, num: int) -> list[int]:
    """Returns at least three tokens that are unique to an id."""
    digits = [hash_id // VOCAB**k % VOCAB for k in range(3)]
    return [(digits[k % 3] + k // 3 * 7) % VOCAB for k in range(num)]


SMALL = EngineConfig(
    num_pages=96,
    page_size=8,
    max_slots=8,
    max_length=256,
    max_sequences=24,
    queue_capacity=16,
    token_budget=256,
    submit_width=16,
    steps_per_call=8,
    prefix_cache=True,
)
"""Room for three sequences of full length and for cached prefixes."""


@pytest.mark.slow
def test_hits_on_a_trace_equal_the_model() -> None:
    asks = scaled(32, num_tokens=8, max_length=SMALL.max_length)
    model = serve(asks, SMALL).model
    assert len(asks) > 100
    assert sum(model.num_cached.values()) > 5000
    assert model.num_evicted > 1000


# A chat: every turn begins with the whole conversation so far.

SYSTEM = np.random.default_rng(5).integers(0, VOCAB, 44).tolist()
NUM_TURNS = 6


class Chat:
    """Users of a chat, each turn of which continues the answer to the last one.

    All but one begin with the same words. There are two tenants; one user disables the
    cache, the rest do so in one turn. Some ask for two answers, and continue the first.
    """

    def __init__(self, num_users: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.first = [self.ask(user, 0, []) for user in range(num_users)]

    def follow(self, name: int, prompt: list[int], answer: list[int]) -> Ask | None:
        user, turn = divmod(name + 1, NUM_TURNS)
        return self.ask(user, turn, prompt + answer) if turn else None

    def ask(self, user: int, turn: int, before: list[int]) -> Ask:
        new = self.rng.integers(0, VOCAB, self.rng.integers(3, 16)).tolist()
        if not turn and user != 1:
            before = SYSTEM
        wish = Sampling(
            temperature=0.0 if user % 3 else 1.0,
            max_tokens=int(self.rng.integers(6, 22)),
            n=1 if user % 4 else 2,
            prefix_cache=user != 2 and (user + turn) % 5 != 4,
            salt=0 if user % 3 else 7,
        )
        return Ask(user * NUM_TURNS + turn, before + new, wish)


def converse(
    num_users: int, config: EngineConfig, *, seed: int = 0, **how: Any
) -> Replay:
    """Serves a chat and checks it with the model."""
    chat = Chat(num_users, seed)

    def follow(outcome: Outcome, ask: Ask) -> Ask | None:
        if outcome.reason == "cancelled":
            return None
        return chat.follow(ask.request_id, ask.prompt, outcome.tokens)

    return serve(chat.first, config, follow=follow, **how)


@pytest.mark.slow
def test_hits_in_a_chat_equal_the_model() -> None:
    replay = converse(20, dataclasses.replace(SMALL, num_pages=88))
    model = replay.model
    asks = replay.asks
    assert asks.keys() == set(range(20 * NUM_TURNS))
    assert sum(model.num_cached.values()) > 2500
    assert model.num_evicted > 400
    assert replay.num_preempted > 4
    # Many requests start on pages of the last answer, too.
    later = [name for name in asks if name % NUM_TURNS]
    beyond = [model.num_cached[name] > len(asks[name - 1].prompt) for name in later]
    assert sum(beyond) > 5


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 50, 20])
def test_concurrent_equal_prompts_equal_the_model(
    chunk_size: int | None,
) -> None:
    rng = np.random.default_rng(2)
    begin = rng.integers(0, VOCAB, 200).tolist()
    prompts = [begin + rng.integers(0, VOCAB, 5).tolist() for _ in range(40)]
    wish = Sampling.greedy(max_tokens=4)
    asks = [Ask(name, prompt, wish) for name, prompt in enumerate(prompts)]
    model = serve(asks, SMALL, chunk_size=chunk_size).model
    # The first requests find no page, later ones the whole common prefix.
    assert 0 in model.num_cached.values()
    assert max(model.num_cached.values()) == 200


@pytest.mark.thorough
def test_hits_with_cancellations_equal_the_model() -> None:
    replay = converse(20, SMALL, seed=1, cancels=0.4)
    reasons = [outcome.reason for outcome in replay.outcomes.values()]
    assert reasons.count("cancelled") > 5


def ignore_salt(state: EngineState) -> EngineState:
    salt = jnp.zeros_like(state.sequences.salt)
    return state._replace(sequences=state.sequences._replace(salt=salt))


def cache_opted_out(state: EngineState) -> EngineState:
    reuses = jnp.ones_like(state.sequences.use_prefix_cache)
    return state._replace(sequences=state.sequences._replace(use_prefix_cache=reuses))


def evict_most_recent(state: EngineState) -> EngineState:
    cache = state.prefixes
    assert cache is not None
    return state._replace(prefixes=prefix_eviction.rerank(cache, -cache.last_used))


def never_match(state: EngineState) -> EngineState:
    cache = state.prefixes
    assert cache is not None
    return state._replace(
        prefixes=cache._replace(buckets=cache.buckets.at[::2].set(-1))
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "wrong",
    [
        ignore_salt,
        cache_opted_out,
        evict_most_recent,
        never_match,
    ],
)
def test_model_detects_faulty_caches(wrong: Callable) -> None:
    with pytest.raises(AssertionError):
        converse(20, SMALL, before_call=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [128, 512])
def test_hits_on_the_whole_trace_equal_the_model(num_pages: int) -> None:
    config = dataclasses.replace(
        SMALL, num_pages=num_pages, max_length=512, steps_per_call=16
    )
    asks = scaled(1, num_tokens=16, max_length=config.max_length)
    model = serve(asks, config).model
    assert len(asks) > 3000
    assert sum(model.num_cached.values()) > 5000
    assert model.num_evicted > 50_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "num_pages", "max_slots", "token_budget", "chunk_size"),
    [
        (8, 96, 8, 256, 50),
        (4, 130, 3, 64, None),
        (1, 520, 5, 40, 7),
        (16, 40, 16, 100, None),
    ],
)
def test_hits_in_long_chats_equal_the_model(
    page_size: int,
    num_pages: int,
    max_slots: int,
    token_budget: int,
    chunk_size: int | None,
) -> None:
    config = dataclasses.replace(
        SMALL,
        page_size=page_size,
        num_pages=num_pages,
        max_slots=max_slots,
        token_budget=token_budget,
    )
    num_preempted = 0
    for seed in range(2):
        how: dict[str, Any] = dict(seed=seed, chunk_size=chunk_size, cancels=0.1 * seed)
        replay = converse(40, config, **how)
        num_preempted += replay.num_preempted
        assert sum(replay.model.num_cached.values()) > 3000
        assert replay.model.num_evicted > 400
    assert num_preempted > 0


def never_used(cache: PrefixCache, ids: Any) -> PrefixCache:
    return cache


def match_any_salt(cache, tokens, num_tokens, salt, wanted):
    return match(cache, tokens, num_tokens, jnp.zeros_like(salt), wanted)


def match_one_page_less(cache, tokens, num_tokens, salt, wanted):
    return match(cache, tokens, num_tokens - 1, salt, wanted)


match = prefix_cache.match


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (prefix_eviction, "mark_used", never_used),
        (prefix_cache, "match", match_any_salt),
        (prefix_cache, "match", match_one_page_less),
    ],
)
def test_model_detects_faulty_programs(
    module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, module, name, wrong)

    def run_steps(*arguments: Any, **keywords: Any) -> Any:
        return engine.run_steps(*arguments, **keywords)

    program = jax.jit(
        run_steps,
        static_argnames=("config", "forward"),
    )
    with pytest.raises(AssertionError):
        converse(40, SMALL, program=program)
