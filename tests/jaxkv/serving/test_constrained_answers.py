"""Engines under grammars: answers match, by the host's loop, with drafts, and in tight
memory."""

import functools
import json
import random
import types
from typing import Any

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import jaxkv
from jaxkv import sampling
from jaxkv.engine import Drafts, Speculation
from jaxkv.engine.emitting import follow_drafts
from jaxkv.sampling import Grammar, Sampling
from jaxkv.speculation import NGram, Rejection, SharedNoiseVerifier, Synthetic
from tests.support import constrained, engines
from tests.support.constrained import END, TOKENS, VOCABULARY, from_regex, from_schema
from tests.support.refusals import refused

PROMPT = [3, 7, 1]


@functools.cache
def engine() -> jaxkv.Engine:
    """The engine of the quick tests."""
    return constrained.make_engine()


def check_answers(
    served: jaxkv.Engine, schemas: list[Any], *, max_tokens: int = 60
) -> int:
    """Asserts that answers are valid; returns the number that ended."""
    asks = [
        Sampling(
            temperature=8.0,
            grammar=from_schema(schema),
            n=1 + i % 2,
            seed=i,
            max_tokens=max_tokens,
        )
        for i, schema in enumerate(schemas)
    ]
    num_ended = 0
    completions = served.generate([PROMPT] * len(asks), asks)
    for schema, completion in zip(schemas, completions, strict=True):
        for answer in completion.answers:
            assert answer.reason in ("stop", "length")
            if answer.reason == "stop":
                jsonschema.validate(json.loads(VOCABULARY.text(answer.tokens)), schema)
                num_ended += 1
    return num_ended


def test_answers_are_valid_documents() -> None:
    rng = random.Random(3)
    schemas = [constrained.draw_schema(rng, 2) for _ in range(12)]
    assert check_answers(engine(), schemas) >= 12


def test_greedy_answers_equal_those_of_the_host_loop() -> None:
    pattern = r'\["(a|é){1,3}"(, -?[0-9]{1,2}){0,2}\]'
    _, prefixes = constrained.viable_prefixes(r'"(a|é){1,3}"', 'aé"', 5)
    grammar = from_regex(pattern)
    ask = Sampling.greedy(max_tokens=24, grammar=grammar)
    free = Sampling.greedy(max_tokens=6)
    constrained_answer, free_answer = engine().generate([PROMPT] * 2, [ask, free])
    tokens = [*PROMPT]
    state = 0
    while tokens[-1] != END:
        padded = jnp.asarray([tokens + [0] * (32 - len(tokens))], jnp.int32)
        logits = engines.full_logits(engines.params(), padded, config=engines.MODEL)
        allowed = grammar.table[state, grammar.classes] >= 0
        allowed[END] = grammar.table[state, 0] >= 0
        masked = np.where(allowed, np.asarray(logits)[0, len(tokens) - 1], -np.inf)
        tokens.append(int(masked.argmax()))
        if tokens[-1] != END:
            state = grammar.table[state, grammar.classes[tokens[-1]]]
    assert constrained_answer.tokens == tokens[len(PROMPT) :]
    text = VOCABULARY.text(constrained_answer.tokens)
    assert text[1 : text.index('"', 2) + 1] in prefixes
    plain = engine().generate([PROMPT], free)[0]
    assert free_answer.tokens == plain.tokens


def test_an_answer_that_reaches_its_limit_is_unfinished() -> None:
    ask = Sampling(grammar=from_regex("a{30}"), max_tokens=5)
    [completion] = engine().generate([PROMPT], ask)
    assert completion.answers[0].reason == "length"
    assert set(VOCABULARY.text(completion.tokens)) == {"a"}


def test_more_grammars_than_places_wait_for_room() -> None:
    served = engine()
    patterns = [f"{digit}a{{1,3}}" for digit in "0123456789"] * 2
    asks = [Sampling(grammar=from_regex(x), max_tokens=8, seed=5) for x in patterns]
    texts = [
        VOCABULARY.text(x.tokens) for x in served.generate([PROMPT] * len(asks), asks)
    ]
    assert [text[0] for text in texts] == [pattern[0] for pattern in patterns]


def test_requests_that_cannot_have_a_grammar_are_refused() -> None:
    grammar = from_regex("ab?a")
    served = engine()
    with refused("needs an end token of the model, and ignore_eos=False"):
        served.submit(PROMPT, Sampling(grammar=grammar, ignore_eos=True))
    with refused("no best_of", "grammar"):
        Sampling(grammar=grammar, beam_width=2)
    large = Grammar("large", grammar.classes, np.zeros((2**17, 2), np.int32))
    with refused("max_grammar_cells=131072"):
        served.submit(PROMPT, Sampling(grammar=large))
    free = constrained.make_engine(max_grammars=0)
    with refused("needs max_grammars above 0"):
        free.submit(PROMPT, Sampling(grammar=grammar))
    # Its programs have neither tables nor states of grammars.
    assert free.rules.grammars is None
    assert free.state.sequences.grammar_state is None


@pytest.mark.thorough
@pytest.mark.usefixtures("no_type_checks")
def test_states_of_a_token_tree_are_those_of_its_paths() -> None:
    grammar = from_regex("(a|ex){1,3}")
    tables = sampling.make_grammar_tables(2, 61, 64)
    tables = sampling.load_grammar(tables, 1, grammar, end_tokens=[END])
    ids = [TOKENS.index(x) for x in (b"a", b"e", b"x", b"1")]
    rng = np.random.default_rng(0)
    tokens = rng.choice(ids, (30, 6))
    parents = np.stack([rng.integers(0, i + 1, 30) for i in range(6)], axis=1)
    start = np.where(np.arange(30) % 5 == 0, -1, 64).astype(np.int32)
    state: Any = types.SimpleNamespace(
        sequences=types.SimpleNamespace(grammar_state=jnp.asarray(start[::-1])),
        slots=types.SimpleNamespace(sequence=jnp.arange(30, dtype=jnp.int32)[::-1]),
    )
    chain = np.broadcast_to(np.arange(6), parents.shape)
    num = jnp.full(30, 6, jnp.int32)
    drafts = Drafts(num, jnp.asarray(tokens, jnp.int32))
    tree = drafts._replace(parents=jnp.asarray(parents, jnp.int32))
    for variant, before in ((drafts, chain), (tree, parents)):
        states = follow_drafts(state, variant, tables).grammar_state
        expected = np.full((30, 7), -1)
        for slot in np.flatnonzero(start >= 0):
            rows = [0]
            for i in range(6):
                row = rows[before[slot, i]]
                if row >= 0:
                    row = grammar.table[row, grammar.classes[tokens[slot, i]]]
                rows.append(row)
            width = grammar.table.shape[1]
            expected[slot] = [64 + row * width if row >= 0 else -1 for row in rows]
        np.testing.assert_array_equal(states, expected)


def asks_of(num: int, **fields: Any) -> list[Sampling]:
    """Requests under grammars and without, sampled and greedy."""
    patterns = [r'\{"a": [0-9]{1,9}\}', "(aa|ex){4,9}", None, r"(true|1,){3,12}"]
    return [
        Sampling(
            temperature=float(i % 3 > 0) * 2,
            grammar=None if (x := patterns[i % 4]) is None else from_regex(x),
            n=1 + i % 2,
            seed=i,
            max_tokens=16,
            **fields,
        )
        for i in range(num)
    ]


def answers_of(served: jaxkv.Engine, asks: list[Sampling]) -> list[list[int]]:
    prompts = [[3, 7, 1 + i % 2] * (1 + i % 4) for i in range(len(asks))]
    return [
        answer.tokens
        for completion in served.generate(prompts, asks)
        for answer in completion.answers
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("full_optimization")
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_drafts_preemption_and_forks_give_the_same_answers(preemption: Any) -> None:
    plain = constrained.make_engine(numerics="reproducible")
    served = constrained.make_engine(
        Speculation(NGram(), SharedNoiseVerifier()),
        jaxkv.fcfs(preemption=preemption),
        numerics="reproducible",
        prefix_cache=True,
        num_pages=22,
        max_drafts=3,
        debug=True,
        max_swap_pages=16 * (preemption == "swap"),
    )
    served.trace.clear()
    served._keep_trace = True
    asks = asks_of(16)
    expected = answers_of(plain, asks)
    assert answers_of(served, asks) == expected
    infos = served.trace
    assert sum(int(x.num_preempted.sum()) for x in infos) > 0
    assert sum(int(np.maximum(x.num_emitted - 1, 0).sum()) for x in infos) > 0
    # A copy in the middle of the answers continues with the same ones.
    ids = [served.submit([3, 7, 1], ask) for ask in asks[:4]]
    served.step()
    copy = served.fork()
    texts = []
    for one in (served, copy):
        done = {x.request_id: x.completion for x in one.stream() if x.completion}
        texts.append([[y.tokens for y in done[i].answers] for i in ids])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_drafted_answers_have_the_distribution_of_masked_sampling() -> None:
    grammar = from_regex("(a|e|aa){6}")
    ask = Sampling(temperature=1.5, grammar=grammar, max_tokens=8)
    counts = []
    for speculation in (None, Speculation(NGram(), Rejection())):
        fields = {"max_drafts": 3 * (speculation is not None)}
        served = constrained.make_engine(speculation, **fields)
        prompts = [[3, *[TOKENS.index(b"a")] * 5]] * 1000
        answers = served.generate(prompts, [ask] * 1000)
        tokens = np.array([(x.tokens + [END] * 6)[:6] for x in answers])
        counts.append([np.bincount(column, minlength=61) for column in tokens.T])
    for plain, drafted in zip(*counts, strict=True):
        spread = np.sqrt(plain + drafted + 1)
        assert (np.abs(plain - drafted) < 4.5 * spread).all()


@pytest.mark.slow
def test_no_verifier_accepts_forbidden_drafts() -> None:
    served = constrained.make_engine(Speculation(NGram(), Synthetic(1.0)), max_drafts=3)
    for ask in asks_of(8):
        if ask.grammar is not None:
            [completion] = served.generate([[3, 7, 3, 7, 3]], ask)
            grammar = ask.grammar
            state = 0
            for token in [x for x in completion.tokens if x != END]:
                state = grammar.table[state, grammar.classes[token]]
                assert state >= 0


@pytest.mark.slow
def test_reported_logprobs_are_raw_and_equal_score() -> None:
    served = constrained.make_engine(numerics="reproducible")
    ask = Sampling(grammar=from_regex("(aa|ex){4,9}"), seed=1, logprobs=0)
    [completion] = served.generate([PROMPT], ask)
    tokens = np.array([[*PROMPT, *completion.tokens]], np.int32)
    scores = jaxkv.score(engines.params(), tokens, config=engines.MODEL)
    np.testing.assert_array_equal(
        np.asarray(scores)[0, len(PROMPT) :],
        np.array(completion.answers[0].logprobs, np.float32),
    )


@pytest.mark.slow
def test_answers_to_200_schemas_are_valid() -> None:
    rng = random.Random(0)
    schemas = [constrained.draw_schema(rng) for _ in range(200)]
    served = constrained.make_engine(max_length=256, num_pages=512)
    assert check_answers(served, schemas, max_tokens=250) >= 280
