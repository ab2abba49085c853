"""OpenAI's API over HTTP: answers, refusals, disconnects, bounds."""

import contextlib
import json
import socket
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from tests.support.mutation import replace

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

from jaxkv.disaggregation import RequestCancelledError
from jaxkv.scheduling import RequestAttributes, attributes
from jaxkv.server import app, http_server, openai_requests
from jaxkv.text import Tokenizer
from tests.support import folders, http_serving
from tests.support.http_serving import Scripted, Serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def backend() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def served(backend: Scripted) -> Iterator[Serving]:
    with http_serving.serving(backend, max_requests=8, deadline_s=5.0) as instance:
        yield instance


@pytest.fixture(autouse=True)
def _none_is_left(backend: Scripted, served: Serving) -> Iterator[None]:
    backend.go.clear()
    yield
    served.wait_until(lambda: not backend.running and not served.service.num_running)


def test_models_health_and_status(served: Serving) -> None:
    assert served.ask("/health", key=None) == (200, b'{"status":"ok"}')
    status, body = served.ask("/v1/models")
    assert [status, json.loads(body)["data"][0]["id"]] == [200, "scripted"]
    assert json.loads(served.ask("/v1/models/scripted")[1])["max_model_len"] == 64
    assert served.error("/v1/models/x", None)[1]["code"] == "model_not_found"
    adapter = json.loads(served.ask("/v1/models/formal")[1])
    assert [adapter["id"], adapter["parent"]] == ["formal", "scripted"]
    assert json.loads(body)["data"][1] == adapter
    status = json.loads(served.ask("/status")[1])
    assert status["backend"]["is_ready"] is True
    assert status["responses"]["404"] >= 1


def test_metrics_count_in_prometheus_text(served: Serving) -> None:
    def value(name: str) -> float:
        status, body = served.ask("/metrics", key=None)
        assert status == 200
        rows = [x.split() for x in body.decode().splitlines() if x[0] != "#"]
        assert all(len(row) == 2 for row in rows)
        return float(dict(rows).get(name, 0))

    before = value("jaxkv_requests_total"), value("jaxkv_completion_tokens_total")
    served.completion(prompt="abc")
    after = value("jaxkv_requests_total"), value("jaxkv_completion_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 3)
    assert value("jaxkv_backend_is_ready") == 1


@pytest.mark.parametrize("key", [None, "", "wrong", http_serving.KEY + "x", "é"])
@pytest.mark.parametrize(
    "path", [COMPLETIONS, CHAT, "/v1/models", "/status", "/tokenize"]
)
def test_without_the_key_there_is_no_answer(
    served: Serving, backend: Scripted, path: str, key: str | None
) -> None:
    num = len(backend.asked)
    body = None if path in ("/v1/models", "/status") else {"prompt": "abc"}
    status, error = served.error(path, body, key=key)
    assert (status, error["code"]) == (401, "invalid_api_key")
    assert len(backend.asked) == num


def test_an_application_without_a_key_asks_for_none() -> None:
    with http_serving.serving(Scripted(), api_key=None) as served:
        assert served.ask("/v1/models", key=None)[0] == 200


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["bcd"]),
        (["abc", "x"], ["bcd", "y"]),
        ([97, 98], ["bc"]),
        ([[97], [100, 101]], ["b", "ef"]),
    ],
)
def test_a_prompt_has_four_forms(
    served: Serving, prompt: Any, texts: list[str]
) -> None:
    response = served.completion(prompt=prompt)
    assert [x["text"] for x in response["choices"]] == texts
    assert [x["index"] for x in response["choices"]] == [*range(len(texts))]
    num = sum(map(len, texts))
    usage = response["usage"]
    assert usage["prompt_tokens"] == usage["completion_tokens"] == num
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2 * len(texts)}
    chunks = served.chunks(COMPLETIONS, prompt=prompt)
    assert chunks.pop() == "[DONE]"
    streamed = [""] * len(texts)
    for chunk in chunks:
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_answers_of_several_prompts_are_ordered_by_index(served: Serving) -> None:
    response = served.completion(prompt=["ab", "x"], n=2, echo=True)
    texts = [x["text"] for x in response["choices"]]
    assert texts == ["abbc", "abbbc", "xy", "xyy"]
    assert [x["index"] for x in response["choices"]] == [0, 1, 2, 3]


@pytest.mark.usefixtures("no_type_checks")
def test_log_probabilities_of_prompt_and_answer(served: Serving) -> None:
    # As lm-eval asks.
    fields = dict(prompt=[[97, 98, 99], [120]], max_tokens=1, temperature=0, seed=1234)
    response = served.completion(**fields, logprobs=1, echo=True)
    first, second = (x["logprobs"] for x in response["choices"])
    assert first["tokens"] == ["a", "b", "c", "b"]
    assert first["token_logprobs"] == [None, -0.5, -1.0, -0.25]
    assert first["top_logprobs"] == [None, {"b": -0.5}, {"c": -1.0}, {"b": -0.25}]
    assert first["text_offset"] == [0, 1, 2, 3]
    assert [len(second[name]) for name in second] == [2] * 4
    # Without an answer, or without alternatives.
    response = served.completion(**fields | {"max_tokens": 0}, logprobs=2, echo=True)
    assert [x["text"] for x in response["choices"]] == ["abc", "x"]
    assert response["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -1.0]
    assert response["choices"][0]["finish_reason"] == "length"
    assert response["usage"]["completion_tokens"] == 0
    logprobs = served.completion(prompt="ab", logprobs=0)["choices"][0]["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == (
        [-0.25, -0.75],
        None,
    )


@pytest.mark.usefixtures("no_type_checks")
def test_offsets_count_special_tokens_of_the_text() -> None:
    backend = Scripted()
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    core.decoder = tokenizers.decoders.Fuse()
    backend.tokenizer = Tokenizer(core)
    ask = dict(max_tokens=0, echo=True, logprobs=0)
    with http_serving.serving(backend) as served:
        for prompt, text, offsets in (
            ("a<|im_end|>b", "a<|im_end|>b", [0, 1, 11]),
            ("<|im_start|><|im_end|>ab", "<|im_start|><|im_end|>ab", [0, 12, 22, 23]),
            # The text of token ids has no special tokens.
            ([0, 2, 1], "ab", [0, 1, 1]),
        ):
            for more in ({}, {"max_tokens": 1}):
                [choice] = served.completion(prompt=prompt, **ask | more)["choices"]
                end = [len(text)] if more else []
                assert choice["logprobs"]["text_offset"] == offsets + end
            assert (
                served.chunks(COMPLETIONS, prompt=prompt, **ask)[-2]["choices"][0][
                    "logprobs"
                ]["text_offset"]
                == offsets
            )
            [choice] = served.completion(prompt=prompt, **ask)["choices"]
            assert choice["text"] == text


def test_half_characters_have_names_of_their_own(served: Serving) -> None:
    choice = served.completion(prompt=[0xE1, 0xE2], logprobs=2)["choices"][0]
    tops = choice["logprobs"]["top_logprobs"]
    assert tops[0] == {"bytes:\\xe2": -0.25, "bytes:\\xe3": -1.25}
    assert [len(x) for x in tops] == [2, 2]


def test_a_chat(served: Serving, backend: Scripted) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "a"}]
    fields: dict[str, Any] = {"messages": messages, "max_completion_tokens": 2}
    status, body = served.ask(CHAT, fields | {"logprobs": True, "top_logprobs": 1})
    response = json.loads(body)
    assert (status, response["object"]) == (200, "chat.completion")
    choice = response["choices"][0]
    assert choice["message"]["content"] == "\\t"
    assert choice["finish_reason"] == "length"
    entry = {"token": "t", "logprob": -0.75, "bytes": [116]}
    assert choice["logprobs"]["content"][1] == entry | {"top_logprobs": [entry]}
    assert bytes(backend.asked[-1][0]) == b"[system]hi[user]a"
    # The rest of max_length, if no limit is given.
    assert served.ask(CHAT, {"messages": HI})[0] == 200
    assert backend.asked[-1][1].max_tokens == 64 - len(b"[user]hi")
    tools = [{"type": "function", "function": {"name": "look"}}]
    for choice, prompt in (("auto", b"[user]hilook"), ("none", b"[user]hi")):
        more = {"tools": tools, "tool_choice": choice}
        assert served.ask(CHAT, {"messages": HI} | more)[0] == 200
        assert bytes(backend.asked[-1][0]) == prompt


def test_a_chat_is_streamed(served: Serving) -> None:
    more = {"n": 2, "max_tokens": 3, "stream_options": {"include_usage": True}}
    chunks = served.chunks(CHAT, messages=HI, logprobs=True, **more)
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    assert all(x["usage"] is None for x in chunks)
    texts = ["", ""]
    ends = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            ends[choice["index"]] = choice
    assert [x["choices"][0]["delta"].get("role") for x in chunks[:2]] == [
        "assistant"
    ] * 2
    assert texts == ["\\vt", "\\\\v"]
    assert [len(ends[i]["logprobs"]["content"]) for i in (0, 1)] == [3, 3]


def test_every_field_reaches_the_sampling(served: Serving, backend: Scripted) -> None:
    sampling_fields: dict[str, Any] = dict(
        temperature=0.5, top_p=0.9, seed=7, presence_penalty=0.25, top_k=3, min_p=0.1,
        frequency_penalty=-0.5, repetition_penalty=1.25, salt=9, stop_tokens=[5, 6],
        ignore_eos=True, prefix_cache=False, max_tokens=7, n=2,
    )  # fmt: skip
    served.completion(prompt="ab", stop=["x", "yz"], deadline_s=2, **sampling_fields)
    _, ask, deadline_s = backend.asked[-1]
    sampling_fields |= {"stop": ("x", "yz"), "stop_tokens": (5, 6)}
    assert {name: getattr(ask, name) for name in sampling_fields} == sampling_fields
    assert deadline_s == 2
    nothing = dict(
        user="u", metadata={"a": "b"}, store=False, logit_bias={}, suffix=None
    )
    served.completion(prompt="ab", stop="x", model="scripted", **nothing)
    _, ask, deadline_s = backend.asked[-1]
    assert (ask.stop, ask.max_tokens, ask.temperature) == (("x",), 16, 1.0)
    assert ask.adapter is None
    assert deadline_s == 5
    served.ask(COMPLETIONS, {"prompt": "a"}, headers={"X-Deadline-S": "1.5"})
    assert backend.asked[-1][2] == 1.5


@pytest.mark.parametrize(
    ("seed", "result"),
    [(-1, None), (0, 0), (-2, 2**64 - 2), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)],
)
def test_seeds_and_top_k_as_in_vllm(
    served: Serving, backend: Scripted, seed: int, result: int | None
) -> None:
    served.completion(prompt="a", seed=seed, top_k=-1)
    assert (backend.asked[-1][1].seed, backend.asked[-1][1].top_k) == (result, 0)


@pytest.mark.parametrize("num", [63, 64])
def test_a_prompt_of_the_full_length_is_scored(served: Serving, num: int) -> None:
    for more in ({}, {"echo": True}, {"echo": True, "logprobs": 0}):
        response = served.completion(prompt="a" * num, max_tokens=0, **more)
        assert response["choices"][0]["text"] == "a" * num * len(more and ["echo"])
        assert response["usage"]["total_tokens"] == num
    assert len(response["choices"][0]["logprobs"]["tokens"]) == num


@pytest.mark.parametrize(
    ("path", "prompt"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})]
)
def test_attributes_of_a_request_reach_the_backend(
    served: Serving, backend: Scripted, path: str, prompt: dict[str, Any]
) -> None:
    all_fields = {name: i for i, name in enumerate(attributes.REQUEST_FIELDS)}
    for fields in ({}, {"priority": -3}, all_fields):
        assert served.ask(path, prompt | fields)[0] == 200
        assert backend.attributes[-1] == RequestAttributes(**fields)
    for fields, line in (
        ({"priority": 1001}, "priority=1001 must be a whole number in [-1000, 1000]"),
        ({"session": "a"}, "session='a' must be a whole number in [-1, 2147483647]"),
        ({"arrival_ms": 0}, "'arrival_ms' is not a field of this API"),
    ):
        status, error = served.error(path, prompt | fields)
        assert (status, error["message"]) == (400, line)
        assert error["param"] == next(iter(fields))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt must be given"),
    (COMPLETIONS, {"prompt": []}, "prompt=[] must be"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt=[1, 'a'] must be"),
    (COMPLETIONS, {"prompt": [True]}, "prompt=[True] must be"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, "must be a text"),
    (COMPLETIONS, {"prompt": [256]}, "token id 256"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "must be a text"),
    (COMPLETIONS, {"prompt": "\ud800"}, "not valid Unicode"),
    (COMPLETIONS, {"prompt": ["a"] * 9}, "9 prompts must be at most 8"),
    (COMPLETIONS, {"prompt": "a" * 64}, "more than max_length=64"),
    (
        COMPLETIONS,
        {"prompt": "a" * 65, "max_tokens": 0},
        "the prompt has 65 tokens, with max_tokens=0 more than max_length=64",
    ),
    *(
        (COMPLETIONS, {"prompt": "a"} | fields, f"{next(iter(fields))}=")
        for fields in (
            {"stop": "\ud800"},
            {"stop": ["a", "b\udfff"]},
            {"user": "\udc00"},
            {"metadata": {"\ud800": [1]}},
            {"salt": "\ud800"},
            {"model": "\ud83d"},
            {"prompt": ["a", "\ud800"]},
            {"seed": -(2**63) - 1},
            {"seed": True},
            {"seed": -1.0},
            {"top_k": -2},
            {"top_k": -1.0},
            {"deadline_s": "5"},
            {"deadline_s": True},
        )
    ),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 64}, "more than max_length=64"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens=-1 must be"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2.5}, "max_tokens=2.5 must be"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature=-1"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature='hot'"),
    (COMPLETIONS, {"prompt": "a", "temperature": float("nan")}, "temperature=nan"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n=0 must be"),
    (COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}, "best_of=2 must be"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop="),
    (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop=5 must be a list"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs=True must be"),
    (COMPLETIONS, {"prompt": "a", "echo": 1}, "echo=1 must be"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**64}, "seed="),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias="),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix='b' is not supported"),
    (COMPLETIONS, {"prompt": "a", "messages": HI}, "'messages' is not a field"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "'temprature' is not a field"),
    (COMPLETIONS, {"prompt": "a", "x\ud800": 1}, "is not a field"),
    (COMPLETIONS, {"prompt": "a", "deadline_s": 0}, "deadline_s=0 must be"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream='yes' must be"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"x": 1}}, "needs stream=true"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "best_of": 2}, "best_of is not"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
        "stream_options=",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
    (CHAT, {"messages": [HI[0] | {"name": "\ud800"}]}, "not valid Unicode"),
    (CHAT, {"messages": HI, "tools": [{"\ud800": 1}]}, "not valid Unicode"),
    (CHAT, {}, "messages must be given"),
    (CHAT, {"messages": []}, "messages must be a list, not empty"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0] must have a role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content must be text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "a part of type 'image_url'",
    ),
    (CHAT, {"messages": HI, "prompt": "a"}, "'prompt' is not a field"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens=0 must be"),
    (
        CHAT,
        {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2},
        "max_tokens=1 must be max_completion_tokens=2",
    ),
    (CHAT, {"messages": HI, "logprobs": 1}, "logprobs=1 must be"),
    (CHAT, {"messages": HI, "top_logprobs": 1}, "needs logprobs=true"),
    (CHAT, {"messages": HI, "tools": "x"}, "tools must be a list"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice="),
    (
        CHAT,
        {"messages": HI, "response_format": {"type": "grammar"}},
        "response_format=",
    ),
    (CHAT, {"messages": HI, "functions": []}, "functions=[] is not supported"),
    ("/tokenize", {"prompt": 5}, "prompt must be text"),
    ("/tokenize", {"prompt": "\ud800"}, "not valid Unicode"),
    ("/detokenize", {"tokens": "x"}, "tokens='x'"),
    ("/detokenize", {"tokens": [1], "y": 1}, "'y' is not a field"),
]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(("path", "fields", "line"), REFUSED)
def test_unsupported_fields_are_refused_by_name(
    served: Serving, path: str, fields: dict[str, Any], line: str
) -> None:
    status, error = served.error(path, fields)
    assert status == 400
    assert line in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "self." not in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[1]", b'"x"', b"[" * 100_000, b'{"n": ' + b"9" * 5000],
)
def test_bodies_that_are_no_json_object_are_refused(
    served: Serving, body: bytes
) -> None:
    status, error = served.error(COMPLETIONS, body)
    assert (status, error["type"]) == (400, "invalid_request_error")


def test_unknown_routes_and_models(served: Serving) -> None:
    assert served.error("/v1/unknown", None)[0] == 404
    assert served.error(COMPLETIONS, None)[0] == 405
    status, error = served.error(COMPLETIONS, {"prompt": "a", "model": "gpt"})
    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"] == "model='gpt' must be 'scripted' or 'formal'"


def test_the_model_of_a_request_may_be_an_adapter(
    served: Serving, backend: Scripted
) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "ab"}), (CHAT, {"messages": HI})):
        status, body = served.ask(path, {"model": "formal"} | fields)
        assert [status, json.loads(body)["model"]] == [200, "formal"]
        assert backend.asked[-1][1].adapter == "formal"


def test_a_body_has_a_bound(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.server.app.MAX_BODY_BYTES", 1000)
    assert served.error(COMPLETIONS, {"prompt": "a" * 2000})[0] == 413
    with contextlib.closing(served.connect()) as connection:
        head = {"Authorization": f"Bearer {http_serving.KEY}"}
        parts = iter([b"a" * 600, b"a" * 600])  # chunked: no length is announced
        connection.request("POST", COMPLETIONS, parts, head, encode_chunked=True)
        assert connection.getresponse().status == 413
    served.completion(prompt="a")


def test_a_slow_body_times_out(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxkv.server.app.BODY_S", 0.05)
    with socket.create_connection(("127.0.0.1", served.port)) as taken:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
        key = f"Authorization: Bearer {http_serving.KEY}\r\n\r\n"
        taken.sendall(f"{head}{key}".encode())
        assert taken.recv(12) == b"HTTP/1.1 408"


def test_failures_have_one_clear_error(served: Serving, backend: Scripted) -> None:
    line = "the backend is broken"
    assert served.error(COMPLETIONS, {"prompt": "fail"})[1]["message"] == line
    assert served.error(COMPLETIONS, {"prompt": ["a", "fail"]})[0] == 500
    first, last = served.chunks(COMPLETIONS, prompt="fail")
    assert first["choices"][0]["text"] == "g"
    assert last["error"]["message"] == line
    status, error = served.error(COMPLETIONS, {"prompt": "nan"})
    assert (status, error["type"]) == (500, "server_error")
    assert (
        "not all finite"
        in served.chunks(COMPLETIONS, prompt="nan")[-1]["error"]["message"]
    )
    status, error = served.error(COMPLETIONS, {"prompt": "wait", "deadline_s": 0.05})
    assert (status, error["code"]) == (504, "deadline_exceeded")
    for prompt, stream in ((["a", "stalls"], False), ("stalls", True)):
        fields = {"prompt": prompt, "stream": stream}
        status, error = served.error(COMPLETIONS, fields)
        assert (status, error["code"]) == (500, "stalled")
        assert error["message"] == "policy Moody made no progress"
    assert served.completion(prompt="a")["choices"][0]["text"] == "b"
    assert (
        served.error(COMPLETIONS, {"prompt": "\x00", "stream": True, "n": 0})[0] == 400
    )


def open_request(served: Serving, **fields: Any) -> socket.socket:
    """Sends a request, and leaves its connection open."""
    body = json.dumps(fields).encode()
    taken = socket.create_connection(("127.0.0.1", served.port))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    taken.sendall(
        f"{head}Authorization: Bearer {http_serving.KEY}\r\n\r\n".encode() + body
    )
    return taken


@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize("prompt", ["wait", ["wait", "waiting"]])
def test_a_client_that_leaves_cancels_its_requests(
    served: Serving, backend: Scripted, prompt: Any, more: dict[str, Any]
) -> None:
    num = 1 if prompt == "wait" else 2
    taken = open_request(served, prompt=prompt, **more)
    served.wait_until(lambda: backend.running == num)
    assert served.service.num_running == num
    taken.close()
    served.wait_until(lambda: backend.running == 0)


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_a_half_closed_client_gets_its_answer(
    served: Serving, backend: Scripted, more: dict[str, Any]
) -> None:
    with open_request(served, prompt="wait", **more) as client:
        served.wait_until(lambda: backend.running == 1)
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
        backend.go.set()
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP") == 1
    assert (
        b"xbju" in answer
        if not more
        else answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    )


@pytest.mark.parametrize("num", [1, 2])
def test_half_closed_pipelines_are_answered(served: Serving, num: int) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(request * num + request[:20])
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).count(b'{"status":"ok"}') == num


def test_a_half_sent_request_of_a_closed_client_ends(served: Serving) -> None:
    for head in (
        "",
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(head.encode())
            client.shutdown(socket.SHUT_WR)
            assert b"200" not in read_all(client)


def read_all(client: socket.socket) -> bytes:
    client.settimeout(10)
    return b"".join(iter(lambda: client.recv(4096), b""))


BOTH = f"""POST {COMPLETIONS} HTTP/1.1
Host: x
Authorization: Bearer {http_serving.KEY}
Content-Length: 5
Transfer-Encoding: chunked

0

"""


@pytest.mark.parametrize(
    "request_text",
    [
        BOTH,
        BOTH.replace(COMPLETIONS, "/unknown"),
        BOTH.replace("POST /v1/completions", "GET /health"),
        BOTH.replace("HTTP/1.1", "HTTP/1.0").replace("Content-Length: 5\n", ""),
        BOTH.replace("Length: 5\nT", "Length: 5\nHost: x\nt").replace(
            "Host: x\n", "", 1
        ),
    ],
)
def test_ambiguous_lengths_end_the_connection(
    served: Serving, backend: Scripted, request_text: str
) -> None:
    smuggled = "GET /health HTTP/1.1\nHost: x\n\n"
    num = len(backend.asked)
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall((request_text + smuggled).replace("\n", "\r\n").encode())
        answer = read_all(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    assert "Transfer-Encoding" in json.loads(body)["error"]["message"]
    assert len(backend.asked) == num


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/status", "/v1/models", "/tokenizer_info"]
)
def test_a_head_request_has_the_headers_of_get(served: Serving, path: str) -> None:
    headers = {"Authorization": f"Bearer {http_serving.KEY}"}
    with contextlib.closing(served.connect()) as connection:
        for method in ("HEAD", "GET"):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200
            assert response.headers["content-type"]
            assert bool(body) == (method == "GET")
    assert served.error(path, b"", key=http_serving.KEY)[0] == 405


def test_too_many_requests_are_refused(served: Serving, backend: Scripted) -> None:
    taken = [open_request(served, prompt="wait") for _ in range(8)]
    served.wait_until(lambda: backend.running == 8)
    status, error = served.error(COMPLETIONS, {"prompt": "abc"})
    assert (status, error["code"]) == (503, "overloaded")
    assert "8 requests are in progress, of at most 8" in error["message"]
    assert served.ask("/health", key=None)[0] == 200
    backend.go.set()
    for connection in taken:
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
    served.wait_until(lambda: served.service.num_running == 0)
    served.completion(prompt="abc")


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"\x00" * 1000,
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 50_000,
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
    b"Connection: upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


def test_garbage_and_silence_delay_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_IDLE_S", 0.3)
    with http_serving.serving(Scripted()) as served, contextlib.ExitStack() as stack:
        silent = []
        for garbage in [*GARBAGE, *[b"", b"GET /he"] * 20]:
            taken = socket.create_connection(("127.0.0.1", served.port))
            stack.enter_context(taken)
            with contextlib.suppress(OSError):
                taken.sendall(garbage)
            silent.append(taken)
        begin = time.monotonic()
        assert served.completion(prompt="abc")["choices"][0]["text"] == "bcd"
        assert time.monotonic() - begin < 2
        for taken in silent[len(GARBAGE) :]:  # closed by the server
            taken.settimeout(5)
            with contextlib.suppress(ConnectionError):
                assert taken.recv(1) == b""
        # A connection between requests is kept.
        with contextlib.closing(served.connect()) as connection:
            for _ in range(2):
                connection.request("GET", "/health")
                assert connection.getresponse().read() == b'{"status":"ok"}'


def test_connections_beyond_the_descriptors_replace_idle_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace(monkeypatch, http_server, "raise_descriptor_limit", lambda: 64 + 4)
    with http_serving.serving(Scripted()) as served, contextlib.ExitStack() as stack:
        for _ in range(20):
            address = ("127.0.0.1", served.port)
            stack.enter_context(socket.create_connection(address))
        for _ in range(3):
            assert served.completion(prompt="abc")["choices"][0]["text"] == "bcd"


def test_stopping_lets_requests_end_or_gives_one_clear_error() -> None:
    backend = Scripted()
    with http_serving.serving(backend) as served:
        taken = open_request(served, prompt="wait", stream=True)
        served.wait_until(lambda: backend.running == 1)
        served.service.is_stopping = True
        assert served.ask("/health", key=None)[0] == 503
        status, error = served.error(COMPLETIONS, {"prompt": "a"})
        assert (status, error["message"]) == (503, "the server is stopping")
        # An engine that is closed, and a router that cancels its requests.
        for ended in (RuntimeError("closed"), RequestCancelledError("cancelled")):
            api_error = served.service.to_api_error(ended)
            assert (api_error.status, str(api_error)) == (503, "the server is stopping")
        backend.go.set()
        received = b""
        while b"[DONE]" not in received:
            received += taken.recv(4096)
        taken.close()
        served.stop()
        with pytest.raises(OSError):  # noqa: PT011 - refused, or reset
            served.ask("/health")


def test_an_unavailable_address_is_refused() -> None:
    with contextlib.closing(http_server.listen("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "no such host"):
            with pytest.raises(
                ValueError, match=f"^{host}:{port} cannot be listened on: "
            ):
                http_server.listen(host, port)
        assert http_server.url_of(taken) == f"http://127.0.0.1:{port}"


def test_a_tokenizer_is_read_over_http(served: Serving) -> None:
    assert json.loads(served.ask("/tokenizer_info")[1])["eos_token"] is None
    response = json.loads(served.ask("/tokenize", {"prompt": "hé"})[1])
    assert response["tokens"] == [104, 195, 169]
    response = json.loads(served.ask("/detokenize", {"tokens": response["tokens"]})[1])
    assert response == {"prompt": "hé"}


def test_the_page_names_every_field() -> None:
    page = (folders.ROOT / "jaxkv/server/README.md").read_text(encoding="utf-8")
    for names in (
        openai_requests._SAMPLING_FIELDS,
        openai_requests._ATTRIBUTE_FIELDS,
        openai_requests._NO_EFFECT,
        openai_requests._COMMON_FIELDS[2:],  # not model and stream
        *openai_requests._ROUTE_FIELDS.values(),
    ):
        assert not [name for name in names if f"`{name}`" not in page.replace(".", "`")]


@pytest.mark.thorough
def test_the_openai_client(served: Serving) -> None:
    openai: Any = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{served.port}/v1"
    with openai.OpenAI(base_url=url, api_key=http_serving.KEY) as client:
        model, adapter = client.models.list().data
        assert adapter.id == "formal"
        done = client.completions.create(model=model.id, prompt=["ab", "x"], n=2)
        assert [x.text for x in done.choices] == ["bc", "bbc", "y", "yy"]
        parts = client.completions.create(model=model.id, prompt="abc", stream=True)
        assert "".join(x.choices[0].text for x in parts) == "bcd"
        fields = dict(model=model.id, messages=HI, logprobs=True, top_logprobs=2)
        chat = client.chat.completions.create(**fields)
        assert chat.choices[0].message.content == "\\vtfs^ij"
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
        with client.chat.completions.stream(**fields) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.content == "\\vtfs^ij"
        assert len(final.logprobs.content) == 8
        with pytest.raises(openai.BadRequestError, match="temperature=-1") as error:
            client.completions.create(model=model.id, prompt="a", temperature=-1.0)
        assert error.value.param == "temperature"
        fails = client.completions.create(model=model.id, prompt="fail", stream=True)
        with pytest.raises(openai.APIError, match="the backend is broken"):
            list(fails)


def test_a_batch_may_be_as_large_as_the_limit() -> None:
    service: Any = types.SimpleNamespace(
        is_stopping=False, num_running=0, _max_requests=8
    )
    with app.HttpService.admit(service, 8):
        assert service.num_running == 8
    assert service.num_running == 0
