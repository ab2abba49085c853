"""`jaxkv generate`: the model's own words, live, as JSON, and errors in one line."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bundled, cli, compiling, generating, showing
from jaxkv import checkpoints, models

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
