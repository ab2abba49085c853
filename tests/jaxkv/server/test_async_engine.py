"""One thread runs an engine for asyncio code: tokens, deadlines, failures."""

import asyncio
import contextlib
import importlib
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jaxkv
from jaxkv import Event, Sampling
from jaxkv.server import AsyncEngine, Backend
from tests.support import engines, moods
from tests.support.folders import TOKENIZED

PROMPTS = [np.random.default_rng(i).integers(5, 60, 3 + i).tolist() for i in range(6)]
ASK = Sampling(max_tokens=12, ignore_eos=True)
LONG = Sampling(max_tokens=50, ignore_eos=True)


def make_engine() -> jaxkv.Engine:
    return jaxkv.Engine.load(TOKENIZED, **vars(engines.SERVED))


@pytest.fixture(scope="module")
def served() -> Iterator[AsyncEngine]:
    with AsyncEngine(make_engine(), model_name="tiny") as async_engine:
        yield async_engine


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """Answers of a plain engine whose request ids are 10, 11, ..."""
    engine = make_engine()
    for i, prompt in enumerate(PROMPTS):
        engine.submit(prompt, ASK, request_id=10 + i)
    done = {x.request_id: x.completion for x in engine.stream() if x.completion}
    return [done[10 + i].tokens for i in range(len(PROMPTS))]


async def events_of(backend: Backend, prompt: Any, ask: Sampling, **more: Any):
    return [event async for event in backend.stream(prompt, ask, **more)]


def tokens_of(events: list[Event]) -> list[int]:
    assert [event.completion is None for event in events[:-1]] == [True] * (
        len(events) - 1
    )
    tokens = [token for event in events for token in event.tokens]
    completion = events[-1].completion
    assert completion is not None
    assert completion.tokens == tokens
    return tokens


def wait_until_idle(served: AsyncEngine) -> None:
    end = time.monotonic() + 20
    while served.engine.has_pending() or served.num_running:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_key_id_keys_the_samples_for_any_request_id(wanted) -> None:
    engine = make_engine()
    for i, prompt in enumerate(PROMPTS):
        # Two requests at a time share a key: names are unique, keys need not be.
        engine.submit(prompt, ASK, request_id=500 - i, key_id=10 + i)
        engine.submit(prompt, ASK, key_id=10 + i)
    done = [x.completion for x in engine.stream() if x.completion]
    by_key = sorted((500 - x.request_id, x.tokens) for x in done if x.request_id > 400)
    assert [tokens for _, tokens in by_key] == wanted
    assert sorted(x.tokens for x in done if x.request_id < 400) == sorted(wanted)


@pytest.mark.parametrize("key_id", [-1, 2**31, True])
def test_invalid_key_ids_are_refused(key_id: Any) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=r"^key_id="):
        engine.submit([5], ASK, key_id=key_id)
    assert not engine.has_pending()


def test_a_stream_has_the_tokens_of_a_plain_engine(served, wanted) -> None:
    async def ask_all() -> list[list[Event]]:
        asks = (events_of(served, x, ASK, key_id=10 + i) for i, x in enumerate(PROMPTS))
        return await asyncio.gather(*asks)

    # On a loop of its own each time, and on two loops at once.
    assert [tokens_of(x) for x in asyncio.run(ask_all())] == wanted
    event_lists: list[Any] = []
    threads = [
        threading.Thread(target=lambda: event_lists.append(asyncio.run(ask_all())))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[tokens_of(x) for x in events] for events in event_lists] == [wanted] * 2
    assert served.num_running == 0


def test_text_prompts_have_text_answers(served) -> None:
    events = asyncio.run(events_of(served, "hello", ASK))
    assert "".join(event.text for event in events) == events[-1].completion.text
    with pytest.raises(ValueError, match="prompt is empty"):
        asyncio.run(events_of(served, [], ASK))
    assert served.num_running == 0


def test_leaving_a_stream_cancels_its_request(served) -> None:
    async def leave() -> None:
        async with contextlib.aclosing(served.stream(PROMPTS[0], LONG)) as events:
            async for _ in events:
                break
        task = asyncio.create_task(events_of(served, PROMPTS[1], LONG))
        await asyncio.sleep(0)  # its submission has started
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    wait_until_idle(served)


def test_a_deadline_ends_a_request(served, wanted) -> None:
    with pytest.raises(TimeoutError, match=r"^deadline_s=0\.001 passed before"):
        asyncio.run(events_of(served, PROMPTS[0], LONG, deadline_s=0.001))
    with pytest.raises(ValueError, match=r"^deadline_s="):
        asyncio.run(events_of(served, PROMPTS[0], ASK, deadline_s=-1))
    wait_until_idle(served)
    events = asyncio.run(events_of(served, PROMPTS[0], ASK, key_id=10, deadline_s=60.0))
    assert tokens_of(events) == wanted[0]


def test_a_closed_loop_affects_no_other_stream(served, wanted) -> None:
    loop = asyncio.new_event_loop()
    stream = served.stream(PROMPTS[0], LONG)
    loop.run_until_complete(anext(stream))
    loop.close()  # without closing the stream
    events = asyncio.run(events_of(served, PROMPTS[2], ASK, key_id=12))
    assert tokens_of(events) == wanted[2]
    wait_until_idle(served)


def test_all_events_of_a_call_come_in_one_wake_up(served) -> None:
    async def count() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        calls = []
        send = loop.call_soon_threadsafe

        def noted(function: Any, *args: Any, **more: Any) -> Any:
            calls.append(getattr(function, "__name__", ""))
            return send(function, *args, **more)

        loop.call_soon_threadsafe = noted
        event_lists = await asyncio.gather(
            *(events_of(served, x, LONG) for x in PROMPTS[:3])
        )
        return calls.count("_put_all"), sum(map(len, event_lists))

    num_calls, num_events = asyncio.run(count())
    assert num_calls < num_events


def test_other_calls_run_in_a_thread(served) -> None:
    assert asyncio.run(served.run(threading.get_ident)) != threading.get_ident()


def test_a_failure_reaches_each_stream_once_and_later_calls_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = AsyncEngine(make_engine())

    def fail(*_: Any) -> None:
        raise FloatingPointError("the device is gone\nand more")

    async def ask() -> list[Any]:
        asks = [events_of(served, x, LONG) for x in PROMPTS[:3]]
        return await asyncio.gather(*asks, return_exceptions=True)

    monkeypatch.setattr(served.engine, "read", fail)
    failures = asyncio.run(ask())
    assert [type(failure) for failure in failures] == [RuntimeError] * 3
    line = "the engine has failed; FloatingPointError: the device is gone"
    assert {str(failure) for failure in failures} == {line}
    assert served.status() == {"is_ready": False, "running": 0}
    for again in (events_of(served, [5], ASK), served.run(int)):
        with pytest.raises(RuntimeError, match="the engine has failed"):
            asyncio.run(again)
    served.close()


@pytest.mark.slow
def test_a_stalled_request_ends_with_its_error_and_the_engine_continues() -> None:
    greedy = Sampling.greedy(max_tokens=4)
    engine = moods.make_engine(moods.REFUSES)
    with AsyncEngine(engine) as served:

        async def ask(prompts: list[list[int]]) -> list[Any]:
            asks = (events_of(served, x, greedy, deadline_s=60) for x in prompts)
            return await asyncio.gather(*asks, return_exceptions=True)

        prompts = [[7, 8, 9], [1, 2, 3, 4], [5, 6]]
        errors = asyncio.run(ask(prompts))
        assert [type(x) for x in errors] == [jaxkv.StallError] * 3
        for prompt, error in zip(prompts, errors, strict=True):
            line = rf"while request_id=\d+, {len(prompt)} prompt tokens, waits"
            assert re.search(line, str(error))
        assert served.status() == {"is_ready": True, "running": 0}
        moods.with_mood(engine, moods.PLAIN)
        assert [len(tokens_of(x)) for x in asyncio.run(ask(prompts))] == [4] * 3
        wait_until_idle(served)


def test_closing_ends_what_runs() -> None:
    served = AsyncEngine(make_engine())

    async def close() -> None:
        stream = served.stream(PROMPTS[0], LONG)
        await anext(stream)
        await asyncio.to_thread(served.close)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            async for _ in stream:
                pass

    asyncio.run(close())
    served.close()
    assert not served._thread.is_alive()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        asyncio.run(events_of(served, [5], ASK))


@pytest.mark.usefixtures("no_type_checks")
def test_an_engine_answers_over_http_with_its_own_tokens(served) -> None:
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    from tests.support import http_serving

    engine = make_engine()
    ask = Sampling.greedy(max_tokens=8, logprobs=1, prompt_logprobs=True)
    plain = engine.generate(PROMPTS[:3], ask)
    completion = engine.generate(["hello"], Sampling(max_tokens=8, seed=5, n=2))[0]
    with http_serving.serving(served) as front:
        fields = dict(max_tokens=8, temperature=0, logprobs=1, echo=True)
        choices = front.completion(prompt=PROMPTS[:3], **fields)["choices"]
        for prompt, choice, done in zip(PROMPTS, choices, plain, strict=False):
            scores = choice["logprobs"]
            num = len(prompt) + len(done.tokens)
            assert {len(column) for column in scores.values()} == {num}
            assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
            answer_logprobs = scores["token_logprobs"][len(prompt) :]
            # lm-eval checks in this way whether a continuation is the greedy one.
            tops = scores["top_logprobs"][len(prompt) :]
            assert answer_logprobs == [max(top.values()) for top in tops]
            assert answer_logprobs == pytest.approx(done.logprobs, abs=1e-5)
            assert choice["text"].endswith(done.text or "?")
        choices = front.completion(prompt="hello", max_tokens=8, seed=5, n=2)["choices"]
        assert [x["text"] for x in choices] == [x.text for x in completion.answers]
        chunks = front.chunks(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=8,
            seed=5,
        )
        prompt = served.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        [done] = engine.generate([prompt], Sampling(max_tokens=8, seed=5))
        parts = [x["choices"][0]["delta"].get("content", "") for x in chunks[:-1]]
        assert "".join(parts) == done.text
        line = "logprobs=3 must be at most config.max_logprobs=2"
        _, error = front.error("/v1/completions", {"prompt": "a", "logprobs": 3})
        assert line in error["message"]
    wait_until_idle(served)


@pytest.mark.parametrize(
    ("module", "missing"), [("app", "fastapi"), ("http_server", "uvicorn")]
)
def test_without_the_extra_an_import_names_it(
    module: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"jaxkv.server.{module}", raising=False)
    with pytest.raises(ImportError) as refusal:
        importlib.import_module(f"jaxkv.server.{module}")
    extra = "pip install 'jaxkv[serve]'"
    assert str(refusal.value) == f"jaxkv.server.{module} needs {missing}: {extra}"
