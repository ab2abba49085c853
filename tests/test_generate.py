"""`jaxkv generate`: the model's own words, live, as JSON, and errors in one line."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bundled, cli, compiling, generating, showing
from jaxkv import checkpoints, models, serving
from jaxkv.answers import Event

TOKENIZED = str(Path(__file__).parent / "golden" / "tokenized")
LLAMA = str(Path(__file__).parent / "golden" / "llama")

Jaxkv = Callable[..., tuple[int, str, str]]


@pytest.fixture
def jaxkv(capsys: pytest.CaptureFixture[str]) -> Jaxkv:
    def call(*args: str) -> tuple[int, str, str]:
        status = cli.main(["generate", *args])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def test_the_bundled_model_goes_on_greedily(jaxkv: Jaxkv) -> None:
    prompt, num = "import os\n\ndef ", 12
    flags = ("--prompt", prompt, "--max-tokens", str(num), "--temperature", "0")
    status, out, _ = jaxkv("stdlib-bytes", *flags, "--json")
    assert status == 0
    (completion,) = json.loads(out)["completions"]
    assert completion.keys() >= {"text", "tokens", "reason"}
    assert completion["reason"] == "length"
    assert bytes(completion["tokens"]).decode() == completion["text"]
    # The same as a plain forward pass over the whole.
    model = checkpoints.load_model(bundled.folder_of("stdlib-bytes"))
    tokens = [*prompt.encode(), *completion["tokens"]]
    logits = models.logits(model.params, jnp.asarray([tokens]), config=model.config)
    best = np.asarray(logits[0]).argmax(-1)[len(prompt) - 1 : -1]
    assert best.tolist() == completion["tokens"]


def test_several_prompts_stream_in_their_order(jaxkv: Jaxkv) -> None:
    flags = ["--prompt", "import ", "--prompt", "class A", "--max-tokens", "12"]
    status, out, err = jaxkv("stdlib-bytes", *flags)
    assert status == 0
    document = json.loads(jaxkv("stdlib-bytes", *flags, "--json")[1])
    first, second = (completion["text"] for completion in document["completions"])
    assert out == f"--- 1 of 2 ---\n{first}\n--- 2 of 2 ---\n{second}\n"
    assert "24 tokens" in err


def test_a_seed_fixes_the_answer_and_a_stop_string_ends_it(jaxkv: Jaxkv) -> None:
    def answer(*flags: str) -> dict:
        words = ("--prompt", "import ", "--max-tokens", "12", "--temperature", "1")
        out = jaxkv("stdlib-bytes", *words, *flags, "--json")[1]
        return json.loads(out)["completions"][0]

    whole = answer("--seed", "3")
    assert whole == answer("--seed", "3")
    assert whole["tokens"] != answer("--seed", "4")["tokens"]
    middle = whole["text"][4]
    cut = answer("--seed", "3", "--stop", middle)
    assert cut["reason"] == "stop"
    assert cut["text"] == whole["text"].partition(middle)[0]


def test_several_answers_to_each_prompt(jaxkv: Jaxkv) -> None:
    def completions(*flags: str) -> list[dict]:
        return json.loads(jaxkv("stdlib-bytes", *flags, "--json")[1])["completions"]

    both = ("--prompt", "import ", "--prompt", "class A", "--max-tokens", "12")
    found = completions(*both, "--n", "2")
    assert [each["prompt"] for each in found] == [0, 0, 1, 1]
    texts = [each["text"] for each in found]
    assert len(set(texts)) == 4
    assert [found[0], found[2]] == completions(*both)
    status, out, err = jaxkv("stdlib-bytes", *both, "--n", "2")
    assert status == 0
    assert out == "".join(
        f"--- {i + 1} of 4 ---\n{text}\n" for i, text in enumerate(texts)
    )
    assert "48 tokens" in err


def test_the_best_of_several_answers(jaxkv: Jaxkv) -> None:
    one = ("--prompt", "import ", "--max-tokens", "12")
    document = json.loads(jaxkv("stdlib-bytes", *one, "--n", "4", "--json")[1])
    drawn = document["completions"]
    best = ("--n", "2", "--best-of", "4")
    document = json.loads(jaxkv("stdlib-bytes", *one, *best, "--json")[1])
    first, second = document["completions"]
    assert first in drawn
    assert second in drawn
    model = checkpoints.load_model(bundled.folder_of("stdlib-bytes"))

    def score(answer: dict) -> float:
        tokens = [*b"import ", *answer["tokens"]]
        logits = models.logits(model.params, jnp.asarray([tokens]), config=model.config)
        law = np.asarray(jax.nn.log_softmax(logits[0], axis=1))
        return sum(float(law[i - 1, tokens[i]]) for i in range(7, len(tokens)))

    assert sorted(drawn, key=score, reverse=True)[:2] == [first, second]
    out = jaxkv("stdlib-bytes", *one, *best)[1]
    texts = [first["text"], second["text"]]
    assert out == "--- 1 of 2 ---\n{}\n--- 2 of 2 ---\n{}\n".format(*texts)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("", "which model? A folder, or one of: stdlib-bytes"),
        ("--prompt x", "which model?"),
        ("stdlib-byte --prompt x", "did you mean stdlib-bytes?"),
        ("no/such/folder --prompt x", "unknown model 'no/such/folder'"),
        ("stdlib-bytes", "give at least one --prompt"),
        ("stdlib-bytes --promt x", "did you mean --prompt?"),
        ("stdlib-bytes --prompt x --temperature -1", "temperature=-1.0"),
        ("stdlib-bytes --prompt x --top-p 0", "top_p=0.0 must be in (0, 1]"),
        ("stdlib-bytes --prompt x --max-tokens 0", "max_tokens=0"),
        ("stdlib-bytes --prompt x --n 0", "n=0 must be at least 1"),
        ("stdlib-bytes --prompt x --n 3 --best-of 2", "best_of=2 must be None or at"),
        ("stdlib-bytes --prompt x --best-of 65", "65 answers to a prompt must be at"),
        ("stdlib-bytes --prompt x --n three", "three"),
        ("stdlib-bytes --prompt x --chat", "no chat template"),
        ("stdlib-bytes --prompt=", "the prompt is empty"),
        (f"stdlib-bytes --prompt {'x' * 1024}", "the prompt has 1024 tokens"),
        (f"{LLAMA} --prompt x", "has no tokenizer that reads text"),
        ("EMPTY --prompt x", "config.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    jaxkv: Jaxkv, tmp_path: Path, args: str, line: str
) -> None:
    words = [str(tmp_path) if word == "EMPTY" else word for word in args.split()]
    status, out, err = jaxkv(*words, "--json")
    assert (status, out) == (2, "")
    assert line in err
    assert err.startswith("jaxkv: ")
    assert err.count("\n") == 1


def test_ctrl_c_keeps_the_words_so_far(
    jaxkv: Jaxkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = generating._Writer.__call__

    def interrupt(self: generating._Writer, index: int, text: str, done: bool) -> None:
        say(self, index, text, done)
        raise KeyboardInterrupt

    monkeypatch.setattr(generating._Writer, "__call__", interrupt)
    monkeypatch.setattr(generating._Writer, "finish", lambda self: None)
    flags = ("--prompt", "import ", "--max-tokens", "12", "--json")
    status, out, _ = jaxkv("stdlib-bytes", *flags)
    assert status == 130
    (completion,) = json.loads(out)["completions"]
    assert completion["reason"] == "cancelled"
    assert 0 < len(completion["tokens"]) <= 12


def test_ctrl_c_while_the_best_is_sought_keeps_what_there_is(
    jaxkv: Jaxkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = serving.Engine.stream

    def interrupted(self: serving.Engine) -> Iterator[Event]:
        for event in stream(self):
            yield event
            if event.sample == 1 and event.tokens:
                raise KeyboardInterrupt

    monkeypatch.setattr(serving.Engine, "stream", interrupted)
    flags = ("--prompt", "import ", "--max-tokens", "12", "--n", "2", "--best-of", "3")
    status, out, _ = jaxkv("stdlib-bytes", *flags)
    document = json.loads(jaxkv("stdlib-bytes", *flags, "--json")[1])
    first, second = document["completions"]
    assert status == 130
    assert {first["reason"], second["reason"]} == {"cancelled"}
    assert 0 < len(first["tokens"]) < 12
    texts = [first["text"], second["text"]]
    assert out == "--- 1 of 2 ---\n{}\n--- 2 of 2 ---\n{}\n".format(*texts)


def test_a_terminal_is_never_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    write = generating._Writer(("a\x1b]b", "c"))
    write(1, "late", True)
    write(0, "x\x1b[2J\r    y", False)
    write.finish()
    assert screen.getvalue() == (
        "--- 1 of 2 ---\n\033[1ma\ufffd]b\033[0mx\ufffd[2J\ufffd    y\n"
        "--- 2 of 2 ---\n\033[1mc\033[0mlate\n"
    )


def test_last_lines_fit_on_a_screen() -> None:
    assert showing.last_lines("a\nbcd\n\tef", num_lines=2, width=3) == "bcd\n   "


def test_a_folder_comes_before_a_bundled_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bundled.folder_of("stdlib-bytes") == bundled.FOLDER / "stdlib-bytes"
    (tmp_path / "stdlib-bytes").mkdir()
    assert bundled.folder_of("stdlib-bytes") == Path("stdlib-bytes")


def test_programs_are_kept_where_nobody_said_otherwise(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    compiling.keep_programs(environ)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "jaxkv")
    environ = {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}
    compiling.keep_programs(environ)
    assert environ == {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}


def test_help_imports_nothing_heavy(jaxkv: Jaxkv) -> None:
    import subprocess

    code = (
        "import sys; from experiments import cli\n"
        "assert cli.main(['generate', '--help']) == 0\n"
        "heavy = {'jax', 'matplotlib', 'flax', 'numpy', 'orbax'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    folder = Path(__file__).parents[1]
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
