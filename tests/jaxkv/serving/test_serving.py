"""The facade `Engine`: text in, text out, no request lost, every refusal one line."""

import dataclasses
import functools
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import tokenizers

import jaxkv
from jaxkv import Sampling
from jaxkv.engine import EngineParts
from jaxkv.models import LoadedModel, PagedForward, load_model, make_model_pages
from jaxkv.serving import requests
from jaxkv.text import ByteTokenizer, Tokenizer
from tests.support import engines
from tests.support import tokenizers as tokenizers_support
from tests.support.folders import TOKENIZED

BOUNDS = engines.SERVED
PROMPTS = ("def bisect_left(a", "import os\n", "class Heap:", "x", "naïve ☃ café")


@functools.cache
def loaded() -> LoadedModel:
    return load_model(TOKENIZED)


def the_tokenizer() -> Tokenizer | ByteTokenizer:
    """The tokenizer of the folder."""
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    return tokenizer


def make_engine(**fields: Any) -> jaxkv.Engine:
    return jaxkv.Engine.load(TOKENIZED, keep_trace=True, **vars(BOUNDS) | fields)


@pytest.fixture(scope="module")
def shared() -> jaxkv.Engine:
    return make_engine()


@pytest.fixture
def engine(shared: jaxkv.Engine):
    """One engine for all tests here; each leaves it idle, with every page free."""
    shared.trace.clear()
    yield shared
    assert_idle(shared)


@pytest.fixture
def full():
    """An engine with prefix cache, beam search and swap."""
    policy = jaxkv.fcfs(preemption="swap")
    engine = make_engine(
        prefix_cache=True, max_beams=3, max_swap_pages=20, policy=policy
    )
    yield engine
    assert_idle(engine)


def assert_idle(engine: jaxkv.Engine) -> None:
    assert list(engine.stream()) == []
    for info in engine.trace:
        engines.assert_sound(info)
    engines.assert_empty(engine.state)
    assert not np.asarray(engine.state.ledger.progress).any()
    assert engine.tracker.is_empty()
    assert not engine.tracker.has_work(1e9)
    assert engine.tracker._requests == 0


def plain_samples(
    prompt: list[int] | str, ask: Sampling, name: int = 0
) -> list[list[int]]:
    """Every answer of a request from the plain loop, one by one."""
    tokens = the_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    config, params, *_ = loaded()
    asks = [engines.Ask(name, tokens, ask)]
    answers_by_name = engines.plain(asks, BOUNDS, model=config, weights=params)
    return [answers_by_name[key][0] for key in engines.names_of(asks)]


@functools.cache
def greedy_answer(prompt: str, num: int = 24) -> tuple[int, ...]:
    [answer] = plain_samples(prompt, Sampling.greedy(max_tokens=num))
    return tuple(answer)


def law_of(tokens: list[int]) -> np.ndarray:
    """Log-probabilities [position, vocab] of the next token at each position."""
    config, params, *_ = loaded()
    ask = engines.Ask(0, tokens, GREEDY)
    return engines.logprobs_of(ask, [], model=config, weights=params)


def scores_of(tokens: list[int]) -> np.ndarray:
    """Log-probability of each token but the first."""
    return law_of(tokens)[np.arange(len(tokens) - 1), tokens[1:]]


class Received(NamedTuple):
    """Contents of the events, by request and sample, and the completions."""

    text: dict[tuple[int, int], str]
    tokens: dict[tuple[int, int], list[int]]
    reasons: dict[tuple[int, int], str]
    done: dict[int, jaxkv.Completion]


def listen(engine: jaxkv.Engine, then: Callable[[jaxkv.Event], None] | None = None):
    """Runs the engine to the end; `then` is called with every event."""
    received = Received({}, {}, {}, {})
    for event in engine.stream():
        assert event.request_id not in received.done
        name = event.request_id, event.sample
        assert not (event.tokens and name in received.reasons)
        received.text[name] = received.text.get(name, "") + event.text
        received.tokens[name] = received.tokens.get(name, []) + list(event.tokens)
        if event.reason is not None:
            assert name not in received.reasons
            received.reasons[name] = event.reason
        if event.completion is not None:
            received.done[event.request_id] = event.completion
        if then is not None:
            then(event)
    return received


def completions(engine: jaxkv.Engine) -> dict[int, jaxkv.Completion]:
    return listen(engine).done


def answer_text(prompt: str, num: int = 24) -> str:
    return the_tokenizer().decode(greedy_answer(prompt, num))


GREEDY = Sampling.greedy(max_tokens=24)


def test_text_in_text_out(engine: jaxkv.Engine) -> None:
    done = engine.generate(PROMPTS, GREEDY)
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert completion.tokens == list(greedy_answer(prompt))
        assert completion.text == answer_text(prompt)
        assert completion.reason == "length"
        assert completion.logprobs is None
        assert completion.top_logprobs is None
        assert completion.prompt_logprobs is None
        assert completion.num_cached == 0


def test_a_token_that_begins_every_text_is_a_prompt(engine: jaxkv.Engine) -> None:
    assert the_tokenizer().encode("") == [0]
    [done] = engine.generate([""], GREEDY)
    assert done.tokens == list(greedy_answer(""))


def test_no_prompts_no_completions(engine: jaxkv.Engine) -> None:
    assert engine.generate([]) == []


def test_stamps_are_in_order(engine: jaxkv.Engine) -> None:
    before = engine.now()
    done = engine.generate(PROMPTS, GREEDY)
    for completion in done:
        assert completion.first_token_s is not None
        assert before <= completion.arrival_s < completion.first_token_s
        assert completion.first_token_s < completion.finish_s <= engine.now()


def test_an_arrival_to_come_is_waited_for(engine: jaxkv.Engine) -> None:
    late = engine.now() + 0.2
    first = engine.submit("x", Sampling.greedy(max_tokens=2))
    second = engine.submit("x", Sampling.greedy(max_tokens=2), arrival_s=late)
    done = completions(engine)
    assert done[second].arrival_s == late
    first_token_s = done[second].first_token_s
    assert first_token_s is not None
    assert first_token_s >= late
    assert done[first].finish_s < late


def test_requests_with_a_later_arrival_block_no_other(engine: jaxkv.Engine) -> None:
    late = engine.now() + 60
    ask = Sampling.greedy(max_tokens=2)
    names = [engine.submit("x", ask, arrival_s=late + i) for i in (1, 0)]
    first = engine.submit("x", ask)
    [done] = engine.generate(["x"], ask)
    assert done.tokens == list(greedy_answer("x"))[:2]
    received = next(event for event in engine.stream() if event.completion is not None)
    assert received.request_id == first
    for name in names:
        engine.cancel(name)
    assert sorted(completions(engine)) == names
    assert engine.now() < late


def test_requests_are_served_in_order_of_arrival(engine: jaxkv.Engine) -> None:
    # Submitted in more than one call; the last to arrive was submitted first.
    ask = Sampling.greedy(max_tokens=6)
    now = engine.now()
    late = [now + 0.4 - 0.02 * i for i in range(12)]
    names = [engine.submit("x", ask, arrival_s=arrival_s) for arrival_s in late]
    done = completions(engine)
    first = [done[name].first_token_s or 0.0 for name in names]
    assert first == sorted(first, reverse=True)
    assert [done[name].arrival_s for name in names] == late
    assert all(a > b for a, b in zip(first, late, strict=True))


def test_generate_does_not_wait_for_other_requests(engine: jaxkv.Engine) -> None:
    long = Sampling.greedy(max_tokens=60, ignore_eos=True)
    names = [engine.submit("x", long) for _ in range(2)]
    engine.generate(["x"], Sampling.greedy(max_tokens=1))
    assert sorted(engine.tracker.records) == names
    received = listen(engine)
    assert sorted(received.done) == names
    for name, completion in received.done.items():
        assert completion.tokens == list(greedy_answer("x", 60))
        assert received.text[name, 0] == answer_text("x", 60)


THREADS = 4


def test_threads_share_an_engine(engine: jaxkv.Engine) -> None:
    left = engine.submit("class Heap:", GREEDY)
    stream = engine.stream()
    text = next(stream).text  # the stream is not continued for now
    texts: dict[int, list[list[str | None]]] = {i: [] for i in range(THREADS)}

    def ask(index: int) -> None:
        for _ in range(3):
            done = engine.generate(PROMPTS[:3], GREEDY)
            texts[index].append([completion.text for completion in done])
            engine.cancel(engine.submit("x", GREEDY))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for event in stream:
        text += event.text if event.request_id == left else ""
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    expected_texts = [answer_text(prompt) for prompt in PROMPTS[:3]]
    assert texts == dict.fromkeys(range(THREADS), [expected_texts] * 3)
    assert text == answer_text("class Heap:")
    completions(engine)  # of the cancelled requests


def test_a_request_id_is_assigned_once(engine: jaxkv.Engine) -> None:
    taken = []
    refused = []
    start = threading.Barrier(THREADS)

    def ask() -> None:
        start.wait()
        try:
            taken.append(engine.submit("x", GREEDY, request_id=7))
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [7]
    assert set(refused) == {"request_id=7 is the name of a request still running"}
    assert list(completions(engine)) == [7]


STOPPED = ("import os\n", "not in", "    ")
"""Prompts whose answers contain enough letters for a stop string."""


def stop_string(text: str, length: int) -> str:
    """The first run of letters, not at the beginning, that does not occur earlier."""
    for start in range(4, len(text)):
        stop = text[start : start + length]
        letters = stop.isascii() and stop.isalpha() and len(stop) == length
        if letters and text.index(stop) == start:
            return stop
    raise AssertionError(f"no {length} letters in {text!r}")


@pytest.mark.parametrize("length", [1, 2, 4, 6])
def test_stop_strings(engine: jaxkv.Engine, length: int) -> None:
    # Anywhere: within a token, or across several tokens.
    stops = [stop_string(answer_text(prompt), length) for prompt in STOPPED]
    names = [
        engine.submit(prompt, Sampling.greedy(max_tokens=24, stop=("never", stop)))
        for prompt, stop in zip(STOPPED, stops, strict=True)
    ]
    received = listen(engine)
    tokenizer = the_tokenizer()
    for name, prompt, stop in zip(names, STOPPED, stops, strict=True):
        text = answer_text(prompt)
        completion = received.done[name]
        expected = text[: text.index(stop)]
        assert completion.reason == "stop"
        assert completion.text == received.text[name, 0] == expected
        # The tokens end with the one that completed the stop string.
        answer = list(greedy_answer(prompt))
        assert completion.tokens == answer[: len(completion.tokens)]
        assert stop in tokenizer.decode(completion.tokens)
        assert stop not in tokenizer.decode(completion.tokens[:-1])


def test_text_that_may_become_a_stop_string_is_held_back(engine: jaxkv.Engine) -> None:
    text = answer_text("x")
    # The stop string never completes: all of the text is shown in the end.
    almost = text[3:10] + "\0"
    engine.submit("x", Sampling.greedy(max_tokens=24, stop=(almost,)))
    shown = ""
    for event in engine.stream():
        shown += event.text
        assert text.startswith(shown)
        if event.completion is not None:
            assert event.completion.reason == "length"
    assert shown == text


def test_text_of_other_tokenizers(
    engine: jaxkv.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same token ids, whose texts are bytes, words and special tokens.
    tokenizer = tokenizers_support.tokenizer_of(tokenizers_support.DECODERS["llama"])
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    prompts = [the_tokenizer().encode(prompt) for prompt in PROMPTS]
    ask = dataclasses.replace(SEVERAL, stop=("</s>", "日"))
    for prompt in prompts:
        engine.submit(prompt, ask)
    received = listen(engine)
    for prompt, completion in zip(prompts, received.done.values(), strict=True):
        for answer in completion.answers:
            text = tokenizers_support.text_after(tokenizer, prompt, answer.tokens)
            name = completion.request_id, answer.sample
            assert answer.text == received.text[name] == text.partition("日")[0]


@pytest.mark.parametrize("place", [3, 8])
def test_a_special_token_as_a_stop_string(
    engine: jaxkv.Engine, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    prompt = the_tokenizer().encode("x")
    answer = list(greedy_answer("x"))
    vocab = {f"▁{i}": i for i in range(320)}
    stop = "<|im_end|>"
    vocab[stop] = vocab.pop(f"▁{answer[place]}")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, stop))
    core.decoder = tokenizers.decoders.Metaspace()
    core.add_special_tokens([stop])
    tokenizer = Tokenizer(core)
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    engine.submit(prompt, Sampling.greedy(max_tokens=24, stop=(stop,)))
    received = listen(engine)
    [done] = received.done.values()
    assert done.reason == "stop"
    assert done.tokens == answer[: answer.index(answer[place]) + 1]
    text = tokenizers_support.text_after(tokenizer, prompt, done.tokens)
    assert done.text == received.text[done.request_id, 0] == text


def test_end_tokens_are_no_text(engine: jaxkv.Engine) -> None:
    answer = greedy_answer("import os\n")
    token = answer[6]
    [done] = engine.generate(
        ["import os\n"], Sampling.greedy(max_tokens=24, stop_tokens=(token,))
    )
    text_tokens = answer[: answer.index(token)]
    assert done.reason == "stop"
    assert done.tokens == [*text_tokens, token]
    assert done.text == the_tokenizer().decode(text_tokens)


def test_the_models_own_end_token(engine: jaxkv.Engine) -> None:
    [eos] = loaded().eos_ids
    asks = [Sampling(seed=seed, max_tokens=40, temperature=5.0) for seed in range(40)]
    on = engine.generate(["x"] * len(asks), asks)
    ended = [
        index for index, completion in enumerate(on) if completion.reason == "stop"
    ]
    assert ended
    off = [dataclasses.replace(asks[index], ignore_eos=True) for index in ended]
    for index, longer in zip(
        ended, engine.generate(["x"] * len(ended), off), strict=True
    ):
        short = on[index]
        assert short.tokens[-1] == eos
        assert short.tokens.count(eos) == 1
        assert short.text == the_tokenizer().decode(short.tokens[:-1])
        assert longer.reason == "length"
        assert len(longer.tokens) == 40
        assert longer.tokens[: len(short.tokens)] == short.tokens


def test_scores(engine: jaxkv.Engine) -> None:
    asks = [
        Sampling.greedy(max_tokens=6, logprobs=2, prompt_logprobs=True),
        Sampling.greedy(max_tokens=6, logprobs=1),
        Sampling.greedy(max_tokens=6, logprobs=0),
        Sampling.greedy(max_tokens=6, prompt_logprobs=True),
    ]
    prompt = the_tokenizer().encode("def f(x):")
    both, top, chosen, of_prompt = engine.generate([prompt] * 4, asks)
    tokens = [*prompt, *both.tokens]
    begin = len(prompt) - 1
    law = law_of(tokens)
    scores = scores_of(tokens)
    for completion in (both, top, chosen):
        assert completion.logprobs == pytest.approx(scores[begin:], abs=1e-4)
    for completion in (both, of_prompt):
        assert completion.prompt_logprobs is not None
        assert completion.prompt_logprobs[0] is None
        assert completion.prompt_logprobs[1:] == pytest.approx(scores[:begin], abs=1e-4)
    assert of_prompt.logprobs is None
    assert chosen.top_logprobs is None
    assert chosen.prompt_logprobs is None
    assert of_prompt.prompt_top_logprobs is top.prompt_top_logprobs is None
    assert both.prompt_top_logprobs is not None
    assert both.prompt_top_logprobs[0] is None
    assert len(both.prompt_top_logprobs) == len(prompt)
    for row, best in zip(law, both.prompt_top_logprobs[1:], strict=False):
        assert best is not None
        assert list(best) == np.argsort(-row, kind="stable")[:2].tolist()
        assert list(best.values()) == pytest.approx(-np.sort(-row)[:2], abs=1e-4)
    for completion, num in ((both, 2), (top, 1)):
        assert completion.top_logprobs is not None
        for row, best in zip(law[begin:-1], completion.top_logprobs, strict=True):
            assert list(best) == np.argsort(-row, kind="stable")[:num].tolist()
            assert list(best.values()) == pytest.approx(-np.sort(-row)[:num], abs=1e-4)


def test_draws_follow_seed_or_request_id(engine: jaxkv.Engine) -> None:
    free = Sampling(max_tokens=12)
    seeded = Sampling(max_tokens=12, seed=5)

    def one(ask: Sampling, request_id: int) -> list[int]:
        engine.submit("x", ask, request_id=request_id)
        [done] = completions(engine).values()
        assert done.request_id == request_id
        return done.tokens

    assert one(free, 1000) == one(free, 1000) != one(free, 1001)
    assert one(seeded, 1000) == one(seeded, 1001)


SEVERAL = Sampling(n=3, seed=7, max_tokens=16, ignore_eos=True)


def test_several_answers_equal_separate_samples(engine: jaxkv.Engine) -> None:
    asks = [
        dataclasses.replace(SEVERAL, n=n, seed=seed)
        for n, seed in ((3, 7), (1, 8), (2, None))
    ]
    names = [engine.submit(*pair) for pair in zip(PROMPTS, asks, strict=False)]
    done = completions(engine)
    for name, prompt, ask in zip(names, PROMPTS, asks, strict=False):
        answers = done[name].answers
        expected = plain_samples(prompt, ask, name)
        assert [answer.sample for answer in answers] == list(range(ask.n))
        assert [answer.tokens for answer in answers] == expected
        assert [answer.text for answer in answers] == [
            the_tokenizer().decode(tokens) for tokens in expected
        ]
        assert {answer.reason for answer in answers} == {"length"}
        assert len({tuple(tokens) for tokens in expected}) == ask.n
        assert done[name].tokens == expected[0]
        assert done[name].num_recomputed == 0


def test_events_of_several_answers_add_up_to_each(engine: jaxkv.Engine) -> None:
    for prompt in PROMPTS:
        engine.submit(prompt, SEVERAL)
    received = listen(engine)
    assert len(received.text) == len(received.reasons) == 15
    for name, completion in received.done.items():
        for answer in completion.answers:
            assert received.text[name, answer.sample] == answer.text
            assert received.tokens[name, answer.sample] == answer.tokens
            assert received.reasons[name, answer.sample] == answer.reason


def own_string(texts: list[str], sample: int) -> str:
    """Two characters in the middle of one text that occur in no other."""
    others = [text for i, text in enumerate(texts) if i != sample]
    for start in range(3, len(texts[sample]) - 3):
        stop = texts[sample][start : start + 2]
        if stop.isascii() and not any(stop in text for text in others):
            return stop
    raise AssertionError(f"no string of its own in {texts!r}")


@pytest.mark.parametrize("sample", [0, 1, 2])
def test_a_stop_string_ends_one_answer(engine: jaxkv.Engine, sample: int) -> None:
    answers = plain_samples("import os\n", SEVERAL)
    texts = [the_tokenizer().decode(tokens) for tokens in answers]
    stop = own_string(texts, sample)
    engine.submit("import os\n", dataclasses.replace(SEVERAL, stop=(stop,)))
    text, _, reasons, done = listen(engine)
    [completion] = done.values()
    for answer in completion.answers:
        expected = texts[answer.sample]
        reason = "length"
        if answer.sample == sample:
            expected = expected[: expected.index(stop)]
            reason = "stop"
            assert len(answer.tokens) < 16
        name = completion.request_id, answer.sample
        assert answer.text == text[name] == expected
        assert answer.reason == reasons[name] == reason
        assert answer.tokens == answers[answer.sample][: len(answer.tokens)]


def test_cancel_ends_every_answer_that_still_runs(engine: jaxkv.Engine) -> None:
    ask = dataclasses.replace(SEVERAL, max_tokens=24)
    answers = plain_samples("class Heap:", ask)
    texts = [the_tokenizer().decode(tokens) for tokens in answers]
    stop = own_string([text[:14] for text in texts], 1)
    name = engine.submit("class Heap:", dataclasses.replace(ask, stop=(stop,)))
    behind = engine.submit("x", GREEDY)

    def cancel(event: jaxkv.Event) -> None:
        if event.request_id == name and event.sample == 1 and event.reason == "stop":
            engine.cancel(name)

    text, _, reasons, done = listen(engine, cancel)
    ended_answers = done[name].answers
    assert [answer.reason for answer in ended_answers] == [
        "cancelled",
        "stop",
        "cancelled",
    ]
    for answer in ended_answers:
        assert reasons[name, answer.sample] == answer.reason
        assert text[name, answer.sample] == answer.text
        assert answer.tokens == answers[answer.sample][: len(answer.tokens)]
        assert answer.tokens
    assert done[behind].text == answer_text("x")


def test_several_answers_withdrawn_before_they_start(engine: jaxkv.Engine) -> None:
    name = engine.submit("x", SEVERAL)
    engine.cancel(name)
    text, _, reasons, done = listen(engine)
    assert [answer.tokens for answer in done[name].answers] == [[], [], []]
    assert set(reasons.values()) == {"cancelled"}
    assert len(reasons) == 3
    assert "".join(text.values()) == ""
    assert not engine.trace


@pytest.mark.parametrize("n", [1, 2, 3])
def test_best_of_gives_the_most_likely_ones_first(engine: jaxkv.Engine, n: int) -> None:
    ask = dataclasses.replace(SEVERAL, n=n, best_of=3)
    for prompt in PROMPTS[:3]:
        [done] = engine.generate([prompt], dataclasses.replace(ask, logprobs=0))
        [same] = engine.generate([prompt], ask)
        start = the_tokenizer().encode(prompt)
        answers = plain_samples(prompt, ask)
        begin = len(start) - 1
        scores = [scores_of([*start, *answer])[begin:].sum() for answer in answers]
        # With `best_of` equal to `n`, answers are not sorted.
        order = np.argsort(scores)[::-1][:n] if n < 3 else np.arange(3)
        assert [answer.sample for answer in done.answers] == order.tolist()
        assert [answer.tokens for answer in done.answers] == [answers[i] for i in order]
        assert [answer.score for answer in done.answers] == pytest.approx(
            [scores[i] for i in order], abs=1e-3
        )
        assert [answer.tokens for answer in same.answers] == [answers[i] for i in order]
        assert same.logprobs is None


def test_an_incomplete_answer_is_never_the_best() -> None:
    parts = [
        requests.PartialAnswer(stream=None, reason="nan"),
        requests.PartialAnswer(
            stream=None, reason="length", tokens=[1, 2], logprobs=[-3.0, -4.0]
        ),
        requests.PartialAnswer(stream=None, reason="stop", tokens=[1], logprobs=[-6.0]),
    ]
    record = requests.RequestRecord(
        request_id=0,
        prompt=[1],
        sampling=Sampling(best_of=3),
        arrival_s=0.0,
        end_tokens=(),
        answers=parts,
    )
    for sample in range(3):
        record.close(sample, None, 0)
    assert record.complete().answers[0].score == -6.0


def halves() -> Tokenizer:
    """Tokens that end within a character: "Hi", "!" and two of three bytes."""
    vocab = {"Hi": 1, "!âĤ": 2, "¬": 3}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "Hi"))
    core.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(core)


def record_of(**fields: Any) -> requests.RequestRecord:
    """A request whose only answer consists of `halves`."""
    sampling = Sampling(**fields)
    tokenizer = halves()
    search = tokenizer.stop_search(sampling.stop)
    return requests.RequestRecord(
        request_id=0,
        prompt=[1],
        sampling=sampling,
        arrival_s=0.0,
        end_tokens=(),
        answers=[requests.PartialAnswer(stream=tokenizer.stream(), search=search)],
    )


@pytest.mark.parametrize("ends", [None, "length", "stop"])
@pytest.mark.parametrize("at_once", [True, False])
def test_no_text_follows_a_stop_string(ends: str | None, at_once: bool) -> None:
    record = record_of(stop=("!",))
    received = ""
    for tokens in [[1, 2]] if at_once else [[1], [2]]:
        reason = ends if tokens[-1] == 2 else None
        event = record.extend(0, tokens, [0.0] * len(tokens), reason, 1.0)
        received += event.text
    record.close(0, None, 0)
    [answer] = record.complete().answers
    assert (answer.text, received, answer.reason) == ("Hi", "Hi", "stop")


def test_half_a_character_at_the_end_is_replaced() -> None:
    record = record_of()
    assert record.extend(0, [1, 2], [0.0] * 2, "length", 1.0).text == "Hi!\ufffd"
    record = record_of(stop=("\ufffd",))
    event = record.extend(0, [1, 2], [0.0] * 2, "length", 1.0)
    assert (event.text, event.reason) == ("Hi!", "stop")
    record = record_of()
    assert record.extend(0, [1, 2], [0.0] * 2, None, 1.0).text == "Hi!"
    record.cancel_sequence(0)
    record.close(0, None, 0)
    [answer] = record.complete().answers
    assert (answer.text, answer.reason) == ("Hi!\ufffd", "cancelled")
    assert answer.text == halves().decode(answer.tokens)


def test_scores_of_several_answers(engine: jaxkv.Engine) -> None:
    ask = dataclasses.replace(SEVERAL, logprobs=2, prompt_logprobs=True)
    prompt = the_tokenizer().encode("def f(x):")
    [done] = engine.generate([prompt], ask)
    for answer in done.answers:
        scores = scores_of([*prompt, *answer.tokens])
        assert done.prompt_logprobs is not None
        of_prompt = scores[: len(prompt) - 1]
        answer_scores = scores[len(prompt) - 1 :]
        assert done.prompt_logprobs[1:] == pytest.approx(of_prompt, abs=1e-4)
        assert answer.logprobs == pytest.approx(answer_scores, abs=1e-4)
        assert answer.score == pytest.approx(answer_scores.sum(), abs=1e-3)
        assert answer.top_logprobs is not None
        assert [len(best) for best in answer.top_logprobs] == [2] * 16


def test_a_prompt_of_the_largest_length_is_scored(engine: jaxkv.Engine) -> None:
    prompt = [7 + 5 * i % 40 for i in range(BOUNDS.max_length)]
    scores = scores_of(prompt)
    for num in (BOUNDS.max_length - 1, BOUNDS.max_length):
        ask = Sampling.greedy(max_tokens=1, logprobs=2, prompt_logprobs=True)
        short = dataclasses.replace(GREEDY, max_tokens=1, n=2)
        done, pair = engine.generate([prompt[:num]] * 2, [ask, short])
        assert done.prompt_logprobs is not None
        assert done.prompt_top_logprobs is not None
        assert done.prompt_logprobs[1:] == pytest.approx(scores[: num - 1], abs=1e-4)
        first, *others = done.prompt_top_logprobs
        assert first is None
        assert [len(best or ()) for best in others] == [2] * (num - 1)
        best = int(law_of([*prompt[:num], 0])[num - 1].argmax())
        assert [x.tokens for x in (done, *pair.answers)] == [[best]] * 3
    for tokens, max_tokens in ((prompt, 2), ([*prompt, 1], 1)):
        with pytest.raises(ValueError, match="leaves room for at most"):
            engine.submit(tokens, Sampling.greedy(max_tokens=max_tokens))


def test_more_answers_than_the_device_holds(engine: jaxkv.Engine) -> None:
    # 8 rows of sequences and 3 slots for about fifty, and pages for one large request.
    rng = np.random.default_rng(1)
    prompts = []
    asks = []
    for size in rng.integers(1, 24, 24):
        prompts.append(rng.integers(2, 320, size).tolist())
        num = int(rng.integers(1, 40))
        own_pages = -(-(int(size) + num - 1) // 4) - size // 4
        n = min(1 + int(rng.integers(3)), (24 - int(size) // 4) // max(1, own_pages))
        asks.append(Sampling(n=int(n), max_tokens=num, ignore_eos=True))
    assert sum(ask.n for ask in asks) > 40
    names = [engine.submit(*pair) for pair in zip(prompts, asks, strict=True)]
    done = completions(engine)
    assert sorted(done) == sorted(names)
    assert sum(completion.num_recomputed for completion in done.values()) > 0
    for name, prompt, ask in zip(names, prompts, asks, strict=True):
        answers = [answer.tokens for answer in done[name].answers]
        assert answers == plain_samples(prompt, ask, name)
    # Requests without a slot wait, on the device or on the host.
    begin = engine.trace[0]
    assert begin.num_waiting[0] == len(names) - begin.num_admitted[0] > 15
    assert engine.trace[-1].num_waiting[-1] == 0
    # First come, first served: requests start in order of arrival.
    first = [done[name].first_token_s or 0.0 for name in names]
    assert first == sorted(first)


@pytest.mark.slow
def test_a_chat_hits_the_pages_of_its_turns(
    engine: jaxkv.Engine, full: jaxkv.Engine
) -> None:
    tokenizer = the_tokenizer()
    history = []
    num_fed = 0
    for turn in PROMPTS[:3]:
        history += tokenizer.encode(turn)
        ask = Sampling.greedy(max_tokens=7)
        [done] = full.generate([history], ask)
        [same] = engine.generate([history], ask)
        assert (done.tokens, done.text) == (same.tokens, same.text)
        # Full pages of the tokens fed so far; at least one token is computed.
        num_hits = min(num_fed, len(history) - 1) // 4 * 4
        assert (done.num_cached, same.num_cached) == (num_hits, 0)
        history += done.tokens
        num_fed = len(history) - 1  # the last token was never fed
    assert num_fed > 24
    full_hit = (len(history) - 2) // 4 * 4
    apart = Sampling.greedy(max_tokens=1, salt=1)
    outside = Sampling.greedy(max_tokens=1, prefix_cache=False)
    inside = Sampling(max_tokens=1, n=3)
    for ask, num_hits in ((inside, full_hit), (outside, 0), (apart, 0)):
        [done] = full.generate([history[:-1]], ask)
        assert done.num_cached == num_hits


def test_cancel_at_any_stage(engine: jaxkv.Engine) -> None:
    long = Sampling.greedy(max_tokens=55)
    names = [engine.submit("x", long) for _ in range(14)]
    engine.cancel(names[13])  # still with the host
    engine.cancel(10**6)  # unknown
    cancelled = {names[13]}
    done = {}
    num_events = 0
    for event in engine.stream():
        num_events += 1
        if event.request_id == names[0] and event.tokens and names[1] not in cancelled:
            # One that runs, one that waits on the device, one that waits on the host.
            for name in (names[1], names[5], names[12]):
                engine.cancel(name)
                engine.cancel(name)
                cancelled.add(name)
        if event.completion is not None:
            done[event.request_id] = event.completion
            engine.cancel(event.request_id)  # already complete: no effect
    assert sorted(done) == sorted(names)
    full = list(greedy_answer("x", 55))
    for name, completion in done.items():
        reason = "cancelled" if name in cancelled else "length"
        assert completion.reason == reason
        assert completion.tokens == full[: len(completion.tokens)]
        assert completion.finish_s >= completion.arrival_s
    assert done[names[1]].tokens
    for name in (names[5], names[12], names[13]):
        assert not done[name].tokens
        assert done[name].text == ""
        assert done[name].first_token_s is None


def test_an_abandoned_stream_can_be_continued(engine: jaxkv.Engine) -> None:
    names = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    done: dict[int, jaxkv.Completion] = {}
    text = dict.fromkeys(names, "")
    for _ in range(200):
        # Streams of one event each lose no event either.
        event = next(engine.stream(), None)
        if event is None:
            break
        text[event.request_id] += event.text
        if event.completion is not None:
            done[event.request_id] = event.completion
    assert sorted(done) == sorted(names)
    for name, prompt in zip(names, PROMPTS, strict=True):
        assert done[name].text == text[name] == answer_text(prompt)


def test_a_broken_invariant_is_raised_with_its_step() -> None:
    engine = make_engine()
    engine.generate(["x"], Sampling.greedy(max_tokens=5))
    num_steps = sum(len(info.enough) for info in engine.trace)
    pool = engine.state.pool
    engine.state = engine.state._replace(pool=pool._replace(ref=pool.ref.at[3].add(1)))
    name = engine.submit("x")
    with pytest.raises(jaxkv.InvariantError) as caught:
        engine.generate(["x"])
    assert str(caught.value) == (
        f"step {num_steps} broke invariants: I1 (pages whose count is not their uses "
        "in tables plus their pins: 1), I2 (breaches of the conservation of pages: 1)"
    )
    is_lost(engine, f"InvariantError: step {num_steps} broke invariants: I1 ")
    engine.cancel(name)


def is_lost(engine: jaxkv.Engine, why: str) -> None:
    """Checks that every use of the engine raises one line."""
    message = f"this engine is lost, make a new one; {why}"
    uses = (
        lambda: engine.generate(["x"]),
        lambda: engine.submit("x"),
        lambda: list(engine.stream()),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=re.escape(message)) as caught:
            use()
        assert "\n" not in str(caught.value)


def test_a_device_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.submit("x")

    def fail(state: Any) -> None:
        jax.tree.map(lambda x: x.delete(), state.pool)
        raise jax.errors.JaxRuntimeError("INTERNAL: no device\nmore of it")

    monkeypatch.setattr(engine._host, "compile", lambda state: None)
    monkeypatch.setattr(engine._host, "exchange", fail)
    engine._needs_host_swap = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="no device"):
        next(engine.stream())
    is_lost(engine, "JaxRuntimeError: INTERNAL: no device")


@pytest.mark.thorough
def test_a_function_that_cannot_be_traced_changes_no_state() -> None:
    # The first attempt is interrupted by Ctrl-C, the second fails.
    errors = [KeyboardInterrupt(), ValueError("not yet")]

    def logits_fn(answer: Any, logits: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return logits

    engine = make_engine(logits_fn=logits_fn)
    name = engine.submit("x", GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[:1], GREEDY)
    with pytest.raises(ValueError, match="not yet"):
        engine.generate(PROMPTS[:1], GREEDY)
    [done] = engine.generate(PROMPTS[:1], GREEDY)
    assert done.text == answer_text(PROMPTS[0])
    assert [completion.text for completion in completions(engine).values()] == [
        answer_text("x")
    ]
    assert name not in engine.tracker.records
    assert_idle(engine)


LONG = [5] * 60


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([5] * 64, {}, r"the prompt has 64 tokens, and config.max_length=64 leaves"),
        ([1], dict(stop_tokens=(320,)), r"token id 320 must be in \[0, 320\)"),
        ([1], dict(stop_tokens=(1, 2, 3)), "3 stop tokens and 1 end tokens .* at most"),
        ([1], dict(logprobs=3), "ask.logprobs=3 must be at most config.max_logprobs=2"),
        (
            [1],
            dict(beam_width=2),
            "ask.beam_width=2 must be at most config.max_b",
        ),
    ],
)
def test_requests_that_cannot_be_served(
    engine: jaxkv.Engine, prompt: Any, fields: dict, message: str
) -> None:
    refused(engine, prompt, Sampling(**fields), message)


def refused(engine: jaxkv.Engine, prompt: Any, ask: Sampling, message: str) -> None:
    """Checks that a request is refused in one line, together with those submitted with
    it.
    """
    with pytest.raises(ValueError, match=message) as caught:
        engine.submit(prompt, ask)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1], prompt], [Sampling(max_tokens=1), ask])
    assert list(engine.stream()) == []


def test_best_answers_need_raw_log_probabilities() -> None:
    engine = make_engine(logprobs_mode="processed_logprobs", max_logprobs=0)
    message = "ask.best_of=3 must be ask.n=1 with config.logprobs_mode='processed"
    refused(engine, [1], Sampling(best_of=3, max_tokens=4), message)


def test_names_of_requests(engine: jaxkv.Engine) -> None:
    engine.submit("x", Sampling(max_tokens=1), request_id=3)
    with pytest.raises(ValueError, match="request_id=3 is the name of a request"):
        engine.submit("x", request_id=3)
    with pytest.raises(ValueError, match="samplings must be"):
        engine.generate(["x"], [GREEDY, GREEDY])
    assert list(completions(engine)) == [3]


def test_a_request_larger_than_the_pool_is_refused() -> None:
    engine = make_engine(num_pages=5)  # 20 places
    message = "the request may need 6 pages, more than config.num_pages=5"
    refused(engine, [5] * 10, Sampling(max_tokens=12), message)
    engine.submit([5] * 10, Sampling(max_tokens=11))


@pytest.mark.slow
def test_without_a_tokenizer_there_is_no_text() -> None:
    config, params, *_ = loaded()
    pages = make_model_pages(config, BOUNDS)
    engine = jaxkv.Engine(EngineParts(params, PagedForward(config), pages, BOUNDS))
    refused(engine, "text", Sampling(), "there is no tokenizer; give token ids")
    refused(engine, [1], Sampling(stop=("x",)), "stop strings need a tokenizer")
    [done] = engine.generate([[5, 6]], Sampling.greedy(max_tokens=3))
    assert len(done.tokens) == 3
    assert done.text is None


def test_scored_prompts_need_spare_rows() -> None:
    engine = make_engine(max_logit_rows=0)
    message = "prompt_logprobs need max_logit_rows above config.max_slots=3"
    refused(engine, [5], Sampling(prompt_logprobs=True), message)


def tokenized_folder(path: Path, eos_ids: list[int], eos_token: str) -> Path:
    """Writes a folder whose tokenizer has another end token than its configuration."""
    folder = shutil.copytree(TOKENIZED, path)
    configured = json.dumps({"eos_token_id": eos_ids})
    (folder / "generation_config.json").write_text(configured)
    settings = folder / "tokenizer_config.json"
    document = json.loads(settings.read_text()) | {"eos_token": eos_token}
    settings.write_text(json.dumps(document))
    return folder


def test_answers_end_at_the_tokenizers_end_token(
    engine: jaxkv.Engine, tmp_path: Path
) -> None:
    ask = Sampling.greedy(max_tokens=8)
    [done] = engine.generate([PROMPTS[0]], ask)
    end = done.tokens[2]
    tokenizer = the_tokenizer()
    assert isinstance(tokenizer, Tokenizer)
    text = tokenizer.core.id_to_token(end)
    assert text is not None
    folder = tokenized_folder(tmp_path / "m", [loaded().config.vocab_size - 1], text)
    for source, num in (
        ("union", done.tokens.index(end) + 1),
        ("generation_config", 8),
    ):
        served = jaxkv.Engine.load(folder, end_tokens=source, **vars(BOUNDS))
        [other] = served.generate([PROMPTS[0]], ask)
        assert other.tokens == done.tokens[:num]


def test_many_end_tokens_load(tmp_path: Path) -> None:
    folder = tokenized_folder(tmp_path / "m", [2, 3, 4, 5, 6], "<|end|>")
    bounds = {name: x for name, x in vars(BOUNDS).items() if name != "max_stop_tokens"}
    served = jaxkv.Engine.load(folder, **bounds)
    num = len(load_model(folder).eos_ids)
    assert num >= 5
    assert served.config.max_stop_tokens == num + 3
    with pytest.raises(ValueError, match=r"must be at most config\.max_stop_tokens=4"):
        jaxkv.Engine.load(folder, max_stop_tokens=4, **bounds)
    assert make_engine().config.max_stop_tokens == BOUNDS.max_stop_tokens


def test_too_many_end_tokens() -> None:
    config, params, *_ = loaded()
    pages = make_model_pages(config, BOUNDS)
    ids = (1, 2, 3, 4)
    parts = EngineParts(params, PagedForward(config), pages, BOUNDS, eos_ids=ids)
    with pytest.raises(ValueError, match=r"must be at most config\.max_stop_tokens=3"):
        jaxkv.Engine(parts)


@pytest.mark.slow
def test_beams_through_the_facade(full: jaxkv.Engine) -> None:
    search = Sampling(beam_width=3, n=2, max_tokens=12, length_penalty=0.5)
    for index, prompt in enumerate(PROMPTS[:2]):
        full.submit(prompt, search, request_id=index)
    full.submit(PROMPTS[0], GREEDY, request_id=9)
    events = list(full.stream())
    done = {event.request_id: event.completion for event in events if event.completion}
    assert done[9].text == answer_text(PROMPTS[0])
    for index, prompt in enumerate(PROMPTS[:2]):
        answers = done[index].answers
        prompt_ids = the_tokenizer().encode(prompt)
        scores = []
        for answer in answers:
            total = scores_of([*prompt_ids, *answer.tokens])[
                len(prompt_ids) - 1 :
            ].sum()
            scores.append(total / len(answer.tokens) ** 0.5)
            assert answer.score == pytest.approx(scores[-1], abs=1e-4)
            name = index, answer.sample
            received = [e.text for e in events if (e.request_id, e.sample) == name]
            assert answer.text == "".join(received)
            assert answer.reason in ("stop", "length")
        assert len(scores) == 2
        assert scores == sorted(scores, reverse=True)


@pytest.mark.slow
def test_swapping_through_the_facade(engine: jaxkv.Engine, full: jaxkv.Engine) -> None:
    # Each needs nearly all pages; the third is swapped to the host and back.
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    ask = Sampling(max_tokens=55, temperature=0.8, ignore_eos=True, logprobs=0)
    plain = engine.generate(prompts, ask)
    names = [completion.request_id for completion in plain]
    for name, prompt in zip(names, prompts, strict=True):
        full.submit(prompt, ask, request_id=name)
    done = completions(full)
    for completion in plain:
        assert done[completion.request_id].tokens == completion.tokens
    assert sum(completion.num_swapped for completion in done.values()) > 1
    assert sum(completion.num_preempted for completion in plain) > 1
    assert not any(completion.num_recomputed for completion in done.values())
    assert any(info.asks_host[-1] for info in full.trace)
    assert full._host.num_used == 0
    with pytest.raises(ValueError, match="host_pages=-1 must be at least 0"):
        make_engine(host_pages=-1)


def test_beams_are_refused_with_a_logits_fn() -> None:
    engine = make_engine(max_beams=2, logits_fn=lambda answer, logits: logits)
    with pytest.raises(ValueError, match="must be None in an engine with a logits_fn"):
        engine.submit([1, 2], Sampling(beam_width=2))


def test_a_token_among_the_most_likely_has_one_value(engine: jaxkv.Engine) -> None:
    """Clients compare with == whether the model would generate a prompt."""
    ask = Sampling.greedy(max_tokens=20, logprobs=1, prompt_logprobs=True)
    [first] = engine.generate([the_tokenizer().encode("def f(x):")], ask)
    prompt = [*the_tokenizer().encode("def f(x):"), *first.tokens]
    begin = len(prompt) - len(first.tokens)
    [again] = engine.generate([prompt], ask)
    assert again.prompt_logprobs is not None
    assert again.prompt_top_logprobs is not None
    for tokens, logprobs, tops in (
        (first.tokens, first.logprobs, first.top_logprobs),
        (again.tokens, again.logprobs, again.top_logprobs),
        (
            first.tokens,
            again.prompt_logprobs[begin:],
            again.prompt_top_logprobs[begin:],
        ),
    ):
        assert logprobs is not None
        assert tops is not None
        assert [{x: y} for x, y in zip(tokens, logprobs, strict=True)] == tops
