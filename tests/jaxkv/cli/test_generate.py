"""`jaxkv generate`: answers of the model, streaming, JSON, and one-line errors."""

import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import files, models
from jaxkv.cli import compilation_cache, generate
from jaxkv.cli.console import AnswerWriter, terminal_text
from jaxkv.models import load_model
from jaxkv.serving import Engine, Event
from tests.support import engines, folders
from tests.support.commands import Command, assert_refused, command, document

LLAMA = str(folders.GOLDEN / "llama")
ONE = ("--prompt", "import ", "--max-tokens", "12")
BOTH = (*ONE, "--prompt", "class A")


@pytest.fixture
def jaxkv(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(capsys, "generate")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return engines.save_tiny_model(folder, max_positions=64)


def completions(called: Command, *args: str) -> list[dict[str, Any]]:
    report = document(called, *args)
    assert report["compile_s"] > 0
    return report["completions"]


@pytest.mark.slow
def test_small_weights_and_their_loss_on_a_text(jaxkv: Command) -> None:
    flags = ("--weights", "int8", "--held-out", __file__, "--max-tokens", "4")
    report = document(jaxkv, "stdlib-bytes", "--prompt", "import ", *flags)
    cost = report["weights"]
    assert cost["format"] == "int8"
    assert abs(cost["loss"]) < 0.01
    assert 0.2 < cost["quantized_bytes"] / cost["model_bytes"] < 0.3
    assert len(report["completions"][0]["tokens"]) == 4


@pytest.mark.slow
def test_the_bundled_model_continues_greedily(jaxkv: Command) -> None:
    prompt = "import os\n\ndef "
    num = 12
    flags = ("--prompt", prompt, "--max-tokens", str(num), "--temperature", "0")
    (completion,) = completions(jaxkv, "stdlib-bytes", *flags)
    assert completion.keys() >= {"text", "tokens", "reason"}
    assert completion["reason"] == "length"
    assert bytes(completion["tokens"]).decode() == completion["text"]
    # Equal to a plain forward pass over the whole sequence.
    best = laws([*prompt.encode(), *completion["tokens"]]).argmax(-1)
    assert best[len(prompt) - 1 : -1].tolist() == completion["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("medusa", marks=pytest.mark.slow), "eagle"]
)
def test_heads_of_the_bundled_model_change_no_token(jaxkv: Command, kind: str) -> None:
    words = ("stdlib-bytes", *BOTH, "--temperature", "0")
    plain = completions(jaxkv, *words)
    answers = completions(jaxkv, *words, "--speculate", kind)
    assert [x["tokens"] for x in answers] == [x["tokens"] for x in plain]
    folder = str(files.find_heads_folder("stdlib-bytes", kind))
    named = completions(jaxkv, *words, "--speculate", kind, "--heads", folder)
    assert [x["tokens"] for x in named] == [x["tokens"] for x in plain]


@pytest.mark.slow
def test_modules_of_the_bundled_model_change_no_token(jaxkv: Command) -> None:
    words = ("stdlib-bytes-deepseek", *BOTH, "--temperature", "0")
    plain = completions(jaxkv, *words)
    answers = completions(jaxkv, *words, "--speculate", "mtp")
    assert [x["tokens"] for x in answers] == [x["tokens"] for x in plain]


def test_heads_of_another_model_are_rejected(jaxkv: Command, tiny: str) -> None:
    folder = files.find_heads_folder("stdlib-bytes", "eagle")
    for words, line in (
        (f"{tiny} --speculate eagle --heads {folder}", "a model with hidden_size=160"),
        (f"{tiny} --speculate eagle", "no eagle heads ship with it"),
        (
            f"stdlib-bytes --speculate ngram --heads {folder}",
            "needs --speculate medusa, or eagle",
        ),
    ):
        assert_refused(jaxkv, f"{words} --prompt a", line)


@pytest.mark.slow
def test_several_prompts_stream_in_their_order(jaxkv: Command) -> None:
    status, out, err = jaxkv("stdlib-bytes", *BOTH)
    assert status == 0
    answers = completions(jaxkv, "stdlib-bytes", *BOTH)
    first, second = (completion["text"] for completion in answers)
    assert out == f"--- 1 of 2 ---\n{first}\n--- 2 of 2 ---\n{second}\n"
    assert "24 tokens" in err


@pytest.mark.slow
def test_a_seed_fixes_the_answer_and_a_stop_string_ends_it(jaxkv: Command) -> None:
    def answer(*flags: str) -> dict:
        words = ("--prompt", "import ", "--max-tokens", "12", "--temperature", "1")
        return completions(jaxkv, "stdlib-bytes", *words, *flags)[0]

    full_answer = answer("--seed", "3")
    assert full_answer == answer("--seed", "3")
    assert full_answer["tokens"] != answer("--seed", "4")["tokens"]
    middle = full_answer["text"][4]
    cut = answer("--seed", "3", "--stop", middle)
    assert cut["reason"] == "stop"
    assert cut["text"] == full_answer["text"].partition(middle)[0]


@pytest.mark.slow
def test_several_answers_to_each_prompt(jaxkv: Command) -> None:
    answers = completions(jaxkv, "stdlib-bytes", *BOTH, "--n", "2")
    assert [answer["prompt"] for answer in answers] == [0, 0, 1, 1]
    texts = [answer["text"] for answer in answers]
    assert len(set(texts)) == 4
    assert [answers[0], answers[2]] == completions(jaxkv, "stdlib-bytes", *BOTH)
    status, out, err = jaxkv("stdlib-bytes", *BOTH, "--n", "2")
    assert status == 0
    assert out == "".join(
        f"--- {i + 1} of 4 ---\n{text}\n" for i, text in enumerate(texts)
    )
    assert "48 tokens" in err


@pytest.mark.slow
def test_the_best_of_several_answers(jaxkv: Command) -> None:
    samples = completions(jaxkv, "stdlib-bytes", *ONE, "--n", "4")
    best = ("--n", "2", "--best-of", "4")
    first, second = completions(jaxkv, "stdlib-bytes", *ONE, *best)
    ranked = sorted(samples, key=lambda sample: -logprob("import ", sample["tokens"]))
    assert [first | {"score": None}, second | {"score": None}] == ranked[:2]
    for answer in first, second:
        expected = logprob("import ", answer["tokens"])
        assert answer["score"] == pytest.approx(expected, abs=1e-3)
    assert {sample["score"] for sample in samples} == {None}
    assert jaxkv("stdlib-bytes", *ONE, *best)[1] == output([first, second])


@pytest.mark.slow
def test_the_best_beams_of_each_prompt(jaxkv: Command, tiny: str) -> None:
    search = ("--beam-width", "4", "--n", "3", "--length-penalty", "0.5")
    status, out, err = jaxkv(tiny, *BOTH, *search)
    assert status == 0
    answers = completions(jaxkv, tiny, *BOTH, *search)
    assert out == output(answers)
    assert err.startswith("[beam search: text appears at the end]\n[length; 72 tokens")
    assert [answer["prompt"] for answer in answers] == [0, 0, 0, 1, 1, 1]
    assert [answer["sample"] for answer in answers] == [0, 1, 2] * 2
    for prompt, selected in ("import ", answers[:3]), ("class A", answers[3:]):
        scores = [answer["score"] for answer in selected]
        totals = [logprob(prompt, answer["tokens"], tiny) for answer in selected]
        assert scores == pytest.approx([total / 12**0.5 for total in totals], abs=1e-3)
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(answer["tokens"]) for answer in selected}) == 3
        flags = ("--prompt", prompt, "--max-tokens", "12", "--temperature", "0")
        (greedy,) = completions(jaxkv, tiny, *flags)
        assert totals[0] > logprob(prompt, greedy["tokens"], tiny) - 1e-3


@pytest.mark.slow
def test_the_score_of_a_single_answer_is_printed(jaxkv: Command) -> None:
    summary = generate._summary([{"tokens": [1], "reason": "stop", "score": -0.5}], 2)
    assert summary == "[stop; 1 tokens in 2.0 s; score -0.500]"
    assert "score" not in jaxkv("stdlib-bytes", *BOTH, "--n", "2")[2]


def test_beam_search_flags_set_sampling_parameters() -> None:
    options = generate.GenerateOptions(
        prompt=("x", "y"), beam_width=3, length_penalty=-1.0
    )
    asks = generate._asks(options)
    assert [ask.beam_width for ask in asks] == [3, 3]
    assert asks[0].length_penalty == -1.0
    for flag, early_stopping in ("false", False), ("true", True), ("never", "never"):
        ask = dataclasses.replace(options, early_stopping=flag)
        assert generate._asks(ask)[0].early_stopping is early_stopping
    # Values that disable an option are allowed.
    generate._asks(dataclasses.replace(options, temperature=0.0, top_p=1.0))


def laws(tokens: list[int], model_name: str = "stdlib-bytes") -> np.ndarray:
    """Returns log-probabilities of the next token after each token."""
    model = load_model(files.model_folder(model_name))
    sequence = jnp.asarray([tokens])
    logits = models.logits(model.params, sequence, config=model.config)
    return np.asarray(jax.nn.log_softmax(logits[0], axis=1))


def logprob(prompt: str, answer: list[int], model_name: str = "stdlib-bytes") -> float:
    """Returns the log-probability of an answer, by a plain forward pass."""
    tokens = [*prompt.encode(), *answer]
    start = len(prompt)
    law = laws(tokens, model_name)
    return sum(float(law[i - 1, tokens[i]]) for i in range(start, len(tokens)))


def output(answers: list[dict]) -> str:
    """Returns the printed form of ranked answers."""
    num = len(answers)
    return "".join(
        f"--- {i + 1} of {num}, score {answer['score']:.3f} ---\n{answer['text']}\n"
        for i, answer in enumerate(answers)
    )


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("", "MODEL is missing: a folder, or one of: stdlib-bytes"),
        ("--prompt x", "MODEL is missing"),
        ("stdlib-byte --prompt x", "stdlib-bytes or stdlib-bytes-deepseek?"),
        ("no/such/folder --prompt x", "unknown model 'no/such/folder'"),
        ("stdlib-bytes", "--prompt must be given at least once"),
        ("stdlib-bytes --promt x", "did you mean --prompt?"),
        ("stdlib-bytes --prompt x --temperature -1", "temperature=-1.0"),
        ("stdlib-bytes --prompt x --best-of 65", "65 answers to a prompt must be at"),
        ("stdlib-bytes --prompt x --n three", "three"),
        ("stdlib-bytes --prompt x --beam-width 65", "65 beams for a prompt must be at"),
        ("stdlib-bytes --prompt x --beam-width 2 --stop y", "stop strings or grammar"),
        ("stdlib-bytes --prompt x --beam-width 2 --top-k 3", "not used by beam search"),
        ("stdlib-bytes --prompt x --beam-width 2 --length-penalty nan", "=nan must be"),
        ("stdlib-bytes --prompt x --beam-width 2 --early-stopping x", "early-stopping"),
        ("stdlib-bytes --prompt x --length-penalty 2", "2.0: needs --beam-width"),
        ("stdlib-bytes --prompt x --early-stopping true", "true: needs --beam-width"),
        ("stdlib-bytes --prompt x --drafts 3", "--drafts 3: needs --speculate METHOD"),
        ("stdlib-bytes --prompt x --drafts 0", "--drafts 0: must be at least 1"),
        ("stdlib-bytes --prompt x --draft-model y", "needs --speculate draft-model"),
        ("stdlib-bytes --prompt x --held-out y", "y: needs --weights of 8 or 4 bits"),
        ("stdlib-bytes --prompt x --heads y", "y: needs --speculate medusa, or eagle"),
        ("stdlib-bytes --prompt x --chat", "no chat template"),
        ("stdlib-bytes --prompt x --lora EMPTY", "has no adapter_config.json"),
        ("stdlib-bytes --prompt x --lora a=", "--lora a=: must be NAME=FOLDER"),
        ("stdlib-bytes --prompt x --lora a=b --lora a=c", "--lora a=c: must be"),
        ("stdlib-bytes --prompt x --lora a=b --lora c=d", "--adapter must be a or c"),
        ("stdlib-bytes --prompt x --adapter a", "adapter='a' must be None in an"),
        ("stdlib-bytes --prompt=", "the prompt is empty"),
        (f"stdlib-bytes --prompt {'x' * 1024}", "the prompt has 1024 tokens"),
        (f"{LLAMA} --prompt x", "has no tokenizer that reads text"),
        ("EMPTY --prompt x", "config.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    jaxkv: Command, tmp_path: Path, args: str, line: str
) -> None:
    assert_refused(jaxkv, args.replace("EMPTY", str(tmp_path)), line)


@pytest.mark.thorough
def test_ctrl_c_keeps_the_text_so_far(
    jaxkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = AnswerWriter.__call__

    def interrupt(self: AnswerWriter, index: int, text: str, done: bool) -> None:
        say(self, index, text, done)
        raise KeyboardInterrupt

    monkeypatch.setattr(AnswerWriter, "__call__", interrupt)
    monkeypatch.setattr(AnswerWriter, "finish", lambda self: None)
    flags = ("--prompt", "import ", "--max-tokens", "12", "--json")
    status, out, _ = jaxkv("stdlib-bytes", *flags)
    assert status == 130
    (completion,) = json.loads(out)["completions"]
    assert completion["reason"] == "cancelled"
    assert 0 < len(completion["tokens"]) <= 12


def interrupt_when(
    monkeypatch: pytest.MonkeyPatch, is_so: Callable[[Event], object]
) -> None:
    """Sends Ctrl-C after the first event that satisfies a condition."""
    stream = Engine.stream

    def interrupted(self: Engine) -> Iterator[Event]:
        for event in stream(self):
            yield event
            if is_so(event):
                raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)


@pytest.mark.thorough
def test_ctrl_c_during_best_of_keeps_partial_answers(
    jaxkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_when(monkeypatch, lambda event: event.sample == 1 and event.tokens)
    flags = ("--prompt", "import ", "--max-tokens", "12", "--n", "2", "--best-of", "3")
    status, out, _ = jaxkv("stdlib-bytes", *flags)
    report = json.loads(jaxkv("stdlib-bytes", *flags, "--json")[1])
    first, second = report["completions"]
    assert status == 130
    assert {first["reason"], second["reason"]} == {"cancelled"}
    assert 0 < len(first["tokens"]) < 12
    texts = [first["text"], second["text"]]
    assert out == "--- 1 of 2 ---\n{}\n--- 2 of 2 ---\n{}\n".format(*texts)


@pytest.mark.slow
def test_ctrl_c_keeps_completed_beam_searches(
    jaxkv: Command, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_when(monkeypatch, lambda event: event.completion is not None)
    search = ("--beam-width", "4", "--n", "3")
    status, out, _ = jaxkv(tiny, *BOTH, *search, "--json")
    assert status == 130
    answers = json.loads(out)["completions"]
    assert [answer["reason"] for answer in answers] == ["length"] * 3 + [
        "cancelled"
    ] * 3
    assert [answer["score"] is None for answer in answers] == [False] * 3 + [True] * 3
    assert [len(answer["tokens"]) for answer in answers] == [12] * 3 + [0] * 3


def test_control_characters_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    write = AnswerWriter(("a\x1b]b", "c"))
    write(1, "late", True)
    write(0, "x\x1b[2J\r    y", False)
    write.finish()
    assert screen.getvalue() == (
        "--- 1 of 2 ---\n\033[1ma\ufffd]b\033[0mx\ufffd[2J\ufffd    y\n"
        "--- 2 of 2 ---\n\033[1mc\033[0mlate\n"
    )


def test_ranked_answers_are_written_whole_and_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = AnswerWriter(("a", "b", "c"), is_whole=True)
    write(2, "z", True, -3.0)
    write(1, "y", True, -2.0)
    assert capsys.readouterr().out == ""
    write(0, "x", True, -1.0)
    write.finish()
    texts = ((1, "-1.000", "x"), (2, "-2.000", "y"), (3, "-3.000", "z"))
    assert capsys.readouterr().out == "".join(
        f"--- {i} of 3, score {score} ---\n{text}\n" for i, score, text in texts
    )


def test_last_lines_fit_on_a_screen() -> None:
    assert terminal_text.last_lines("a\nbcd\n\tef", num_lines=2, width=3) == "bcd\n   "


def test_a_folder_takes_precedence_over_a_bundled_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert files.model_folder("stdlib-bytes") == files.BUNDLED / "stdlib-bytes"
    (tmp_path / "stdlib-bytes").mkdir()
    assert files.model_folder("stdlib-bytes") == Path("stdlib-bytes")


def test_the_engine_has_a_slot_for_each_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "load_engine", lambda *_, **fields: fields)
    for fields, max_slots in (
        ({"n": 2}, 2),
        ({"n": 2, "best_of": 5}, 8),
        ({"n": 3, "beam_width": 3}, 4),
        ({"prompt": ("a", "b", "c"), "n": 9}, 16),
    ):
        merged: Any = {"prompt": ("a",)} | fields
        options = generate.GenerateOptions(**merged)
        parts: Any = generate._engine(str(folders.TOKENIZED), options)
        bounds, prompts, _ = parts
        assert bounds["max_slots"] == max_slots
        assert len(prompts) == len(options.prompt)


def test_compile_time_is_reported_separately() -> None:
    summary = generate._summary(
        [{"tokens": [1], "reason": "stop", "score": None}], 2, 6
    )
    assert summary == "[stop; 1 tokens in 2.0 s; compiled in 6.0 s]"


def test_programs_are_cached_in_the_default_folder(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    compilation_cache.enable_program_cache(environ)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "jaxkv")
    environ = {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}
    compilation_cache.enable_program_cache(environ)
    assert environ == {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}


@pytest.mark.thorough
def test_answers_match_a_schema(jaxkv: Command, tiny: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [true, 12]}}')
    (completion,) = completions(jaxkv, tiny, *ONE, "--json-schema", str(schema))
    if completion["reason"] == "stop":
        assert {*json.loads(completion["text"])} <= {True, 12}
    else:
        assert completion["text"].startswith("[")
    assert_refused(
        jaxkv,
        f"{tiny} --prompt a --json-schema {schema} --regex a",
        "--regex: is not supported with --json-schema",
    )
    assert_refused(
        jaxkv,
        f"{tiny} --prompt a --regex a --beam-width 2 --temperature 0",
        "--regex: not used by beam search",
    )
    assert_refused(jaxkv, f"{tiny} --prompt a --regex (", "grammar='('")
