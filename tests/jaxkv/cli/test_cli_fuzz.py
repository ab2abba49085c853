"""Random invalid arguments, values and files: a result, or a one-line error."""

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import results_page
from jaxkv.cli import generate, main
from jaxkv.files import model_folder
from jaxkv.report import config_dumps
from scaling.cli import FitConfig
from scaling.cli.cost import command as cost_command
from scaling.cli.plan import options as plan_options
from scaling.cli.train import command as train_command
from scaling.sweeps import SWEEPS, TRAININGS
from tests.support.commands import assert_refused, command
from tests.support.folders import RECORDS

OPTIONS = {
    "cost": cost_command.CostOptions,
    "plan": plan_options.PlanOptions,
    "fit": FitConfig,
    "generate": generate.GenerateOptions,
    "train": train_command.TrainOptions,
    "sweep": train_command.SweepOptions,
    "claims": results_page.ClaimsOptions,
}
OF_RUNS = ("out", "config", "max_seconds", "load.rate", "limit", "name")
"""Flags of runs of `made_up`."""

VALUES = [
    *"0 -1 1 2 1.5 nan inf -inf 1e400 1e309 -0 0x10 true None x {} [] 1,2".split(),
    "99999999999999999999",
    "2147483648",
    "1_000",
    "\uff11",
    "é\u202e",
    "a\nb",
    "",
    " ",
    ",",
    "=",
    "--",
    "\udcff",
    "x" * 300,
    "%n",
    "no/such",
    "/dev/null",
]
JSON_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    -1e308,
    10**30,
    float("nan"),
    float("inf"),
    "x",
    "",
    "nan",
    "\udcff",
    "\0",
    [],
    {},
    [[]],
    {"a": 1},
]
TEXTS = {
    "empty": "",
    "list.json": "[1, 2, 3]",
    "null.json": "null",
    "nan.json": '{"a": NaN, "b": Infinity}',
    "huge.json": "1e400",
    "cut.json": '{"model": {"vocab',
    "deep.json": "[" * 100_000,
    "bad.csv": "N,D,loss\n1,2,x\n3,,nan\n-1,inf,2\n",
    "one.csv": "N,D,loss\n1e6,1e8,3\n",
    "head.csv": "N,D,loss\n",
    "twice.csv": "N,N,D,loss\n1,2,3,4\n",
    "ragged.csv": "N,D,loss\n1,2\n1,2,3,4\n",
    "rows.jsonl": '{"N": 1e6, "D": 1e8, "loss": 3}\nnot json\n',
    "types.jsonl": '{"N": "a", "D": null, "loss": [1]}\n[]\n',
    "half/config.json": '{"model_type":',
    "sweep/runs.jsonl": '{"run_id": 1}\n{"x',
    "sweep/sweep.json": "[]",
    "full/notes.txt": "mine",
}
FOLDERS = ("folder", "half", "sweep", "full", "inside")
FILES = [*TEXTS, *FOLDERS, "binary", "loop", "missing", "/dev/zero", "/proc/self/mem"]


class Fuzz:
    """Draws command lines, and writes the files that they name."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        for name, text in TEXTS.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        Path("binary").write_bytes(bytes(range(256)) * 4)
        Path("folder").mkdir()
        Path("inside/config.json").mkdir(parents=True)
        Path("loop").symlink_to("loop")

    def words(self) -> list[str]:
        """Returns a command line, which is most probably invalid."""
        rng = self._rng
        command = rng.choice([*OPTIONS, *OPTIONS, "run", "bench", "demo", "list", "?"])
        if command == "?":
            return [self._value(), self._value()]
        words = [command, *getattr(self, f"_{command}")(), *self._flags(command)]
        return words + ["--json"] * (rng.random() < 0.3)

    def _value(self) -> str:
        return self._rng.choice(VALUES if self._rng.random() < 0.8 else FILES)

    def _file(self) -> str:
        return self._rng.choice([*FILES, *VALUES])

    def _flags(self, command: str) -> list[str]:
        flag_names = OF_RUNS
        if command in OPTIONS:
            flag_names = [field.name for field in dataclasses.fields(OPTIONS[command])]
            if command == "generate":
                flag_names += [
                    x.name for x in dataclasses.fields(generate.ModelOptions)
                ]
        words = []
        for _ in range(self._rng.choice([0, 1, 1, 2, 3])):
            name = self._rng.choice([*flag_names, "bogus"]).replace("_", "-")
            words += [f"--{name}", self._value()][: self._rng.choice([1, 2, 2, 2, 2])]
        return words

    def _changed(self, value: Any) -> Any:
        """Returns a document with an error at any depth."""
        rng = self._rng
        if isinstance(value, dict) and value:
            key = rng.choice([*value])
            luck = rng.random()
            if luck < 0.2:
                return {name: value[name] for name in value if name != key}
            new = {"bogus": 1} if luck < 0.3 else {key: self._changed(value[key])}
            return value | new
        if isinstance(value, list) and value and rng.random() < 0.6:
            at = rng.randrange(len(value))
            return [*value[:at], self._changed(value[at]), *value[at + 1 :]]
        return rng.choice(JSON_VALUES)

    def _copy(self, path: Path, name: str) -> str:
        document = json.loads(path.read_text())
        for _ in range(self._rng.choice([1, 1, 2, 3])):
            document = self._changed(document)
        Path(name).write_text(json.dumps(document))
        return name

    def _cost(self) -> list[str]:
        if self._rng.random() < 0.4:
            return ["llama-2-7b"]
        bundle = Path(model_folder("stdlib-bytes"), "config.json")
        is_file = self._rng.random() < 0.5
        return [self._file() if is_file else self._copy(bundle, "mine.json")]

    def _plan(self) -> list[str]:
        fit = self._copy(RECORDS / "isoflop" / "fit.json", "fit.json")
        law = self._rng.choice(["lecture", fit, fit, self._file()])
        return ["--flops", "1e14", "--law", law][: self._rng.choice([2, 4, 4, 4])]

    def _fit(self) -> list[str]:
        if self._rng.random() < 0.5:
            log = self._rng.choice([x for x in FILES if x != "/dev/zero"])
            return [log, "--bootstrap", "2"]
        shutil.rmtree("mine", ignore_errors=True)
        Path("mine").mkdir()
        self._copy(RECORDS / "isoflop" / "sweep.json", "mine/sweep.json")
        rows = (RECORDS / "isoflop" / "runs.jsonl").read_text().splitlines()
        rows = rows[: self._rng.choice([0, 1, 3, 5, len(rows), len(rows)])]
        for at in self._rng.sample(range(len(rows)), min(len(rows), 2)):
            rows[at] = json.dumps(self._changed(json.loads(rows[at])))
        Path("mine/runs.jsonl").write_text("".join(f"{row}\n" for row in rows))
        return ["mine", "--bootstrap", "2"]

    def _generate(self) -> list[str]:
        return [self._file(), "--prompt", self._value()]

    def _train(self) -> list[str]:
        return self._trained(TRAININGS["smoke"])

    def _sweep(self) -> list[str]:
        return self._trained(SWEEPS["smoke"])

    def _trained(self, config: Any) -> list[str]:
        if self._rng.random() < 0.4:
            return [self._file()]
        document = self._changed(json.loads(config_dumps(config)))
        Path("mine.json").write_text(json.dumps(document))
        return ["mine.json", "--print-config"]

    def _claims(self) -> list[str]:
        shutil.rmtree("claims", ignore_errors=True)
        Path("claims").mkdir()
        for name in ("env", "claims", "config"):
            self._copy(RECORDS / "demo" / f"{name}.json", f"claims/{name}.json")
        return ["--folder", self._rng.choice(["claims", "claims", self._file()])]

    def _run(self) -> list[str]:
        if self._rng.random() < 0.3:
            return [self._file(), self._file()]
        config = self._changed({"load": {"rate": 2.0, "lengths": [1]}, "num_points": 2})
        Path("mine.json").write_text(json.dumps(config))
        file = self._rng.choice(["mine.json", self._file()])
        return ["made_up", *self._rng.choice([[], [self._value()], ["--config", file]])]

    def _bench(self) -> list[str]:
        return [self._file()]

    def _demo(self) -> list[str]:
        return ["--config", self._rng.choice([x for x in FILES if "." in x])]

    def _list(self) -> list[str]:
        return []


def hold(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Runs a command, and checks how it ends."""
    status = main.main(words)
    out, err = capsys.readouterr()
    assert status in (0, 2), (words, err)
    if status == 0 and "--json" in words and not {"-h", "--help"} & {*words}:
        json.loads(out)
    if status == 2:
        *before, line = err.splitlines()
        assert line.startswith("jaxkv: "), words
        assert len(line) < 2000, words
        # Progress lines and warnings may precede the error.
        output = (" resamples", " points", "jaxkv: warning: ")
        assert all(any(x in printed_line for x in output) for printed_line in before), (
            words,
            err,
        )
        assert out == "" or "--json" not in words, words
    half = [
        os.path.join(folder, name)
        for folder, folders, files in os.walk(".")
        for name in (*folders, *files)
        if name.startswith(".") or name.endswith((".new", ".part"))
    ]
    assert not half, words
    assert Path("full/notes.txt").read_text() == "mine", words
    return status


@pytest.mark.parametrize(
    ("seed", "num"),
    [
        (0, 50),
        pytest.param(1, 150, marks=pytest.mark.thorough),
        pytest.param(2, 1850, marks=pytest.mark.slow),
    ],
)
def test_random_arguments_give_a_result_or_a_one_line_error(
    seed: int, num: int, work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzz = Fuzz(seed)
    statuses = [hold(fuzz.words(), capsys) for _ in range(num)]
    assert statuses.count(2) > num / 2  # most are invalid
    assert statuses.count(0) > num / 50  # and some are valid
    assert main.main(["run", "made_up", "--out", "after", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["points"] == 5


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("cost /dev/zero", "/dev/zero: holds over 268,435,456 characters"),
        ("train /dev/zero", "/dev/zero: holds over 268,435,456 characters"),
        ("cost deep.json", "deep.json: not JSON: maximum recursion depth exceeded"),
        ("train deep.json", "deep.json: not JSON: maximum recursion depth exceeded"),
        ("run made_up --config inside/config.json", "inside/config.json: [Errno 21] I"),
        ("run made_up --out full", "full: holds files that are not a run"),
        ("run made_up --out loop", "loop: cannot be written: File exists"),
        ("run made_up --name \udcff", "config.json: cannot be written: 'utf-8' codec"),
        ("claims --folder folder", "folder: holds no run folder with a claims.json"),
    ],
)
def test_unreadable_files_are_named_in_the_error(
    words: str, line: str, work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Fuzz(0)
    assert_refused(command(capsys), words, line)
