"""How soon after its start does a process have the first answer of a model?

Every start is a new process that imports jaxkv, loads an engine and asks it twice. A
cold start has no compiled programs on disk; a warm one has those of the cold start
before it. Wall time runs from the creation of the process to its end.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Literal, TypedDict

from experiments import lab
from experiments.bench.tables import draw_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("cold", "warm")

_SCRIPT = """
import json, sys, time
begin = time.perf_counter()
import jaxkv
model, num = sys.argv[1], int(sys.argv[2])
engine = jaxkv.Engine.load(jaxkv.files.model_folder(model), max_slots=4, num_pages=128)
ask = jaxkv.Sampling.greedy(max_tokens=num)
times = [time.perf_counter()]
for _ in range(2):
    engine.generate(["def read_lines(path):\\n"], ask)
    times.append(time.perf_counter())
load, first, second = (b - a for a, b in zip([begin, *times], times))
print(json.dumps({"load_s": load, "first_s": first, "second_s": second}))
"""


class Config(lab.ConfigRecord):
    """The model and the number of starts."""

    model: str = "stdlib-bytes"
    """Name of a bundled model, or a folder."""
    num_tokens: lab.PositiveInt = 32
    """Tokens of an answer."""
    rounds: lab.PositiveInt = 3
    """Cold and warm starts."""


CONFIGS = {"real": Config(), "smoke": Config(num_tokens=2, rounds=1)}


class StartTimes(lab.ResultTable):
    """Medians over the rounds."""

    kind: lab.Texts = lab.column("cold or warm", heading="start")
    wall_s: lab.Floats = lab.column(
        "time of the process", heading="process", form=lab.format_seconds
    )
    load_s: lab.Floats = lab.column(
        "imports and loading", heading="imports, loading", form=lab.format_seconds
    )
    first_s: lab.Floats = lab.column(
        "first answer", heading="first answer", form=lab.format_seconds
    )
    second_s: lab.Floats = lab.column(
        "second answer", heading="second answer", form=lab.format_seconds
    )


class StartTime(TypedDict):
    """Times of one start in s; values in the order of `StartTimes`."""

    kind: Literal["cold", "warm"]
    wall_s: float
    load_s: float
    first_s: float
    second_s: float


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[StartTime]:
    """Starts processes in turns; a stopped run has complete starts.

    Raises:
      RuntimeError: a process failed.
    """
    starts: list[StartTime] = []
    for _ in progress.track(range(config.rounds), "starts", "rounds"):
        with tempfile.TemporaryDirectory() as folder:
            starts += [_start(kind, config, folder) for kind in KINDS]
    return starts


def _start(
    kind: Literal["cold", "warm"], config: Config, cache_folder: str
) -> StartTime:
    """Runs one process with its cache of programs in a folder."""
    keep = {x: os.environ[x] for x in os.environ if not x.startswith("JAX_COMPIL")}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, config.model, str(config.num_tokens)],
        env={**keep, "XDG_CACHE_HOME": cache_folder},
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"the process failed: {done.stderr.strip()[-300:]}")
    times = json.loads(done.stdout.splitlines()[-1])
    return StartTime(kind=kind, wall_s=wall_s, **times)


def _medians(result: list[StartTime]) -> StartTimes:
    names = ("wall_s", "load_s", "first_s", "second_s")
    rows = []
    for kind in KINDS:
        if starts := [x for x in result if x["kind"] == kind]:
            rows.append(
                [kind, *(statistics.median(y[x] for y in starts) for x in names)]
            )
    return StartTimes.of(rows)


def summary(result: list[StartTime]) -> list[lab.ReportPart]:
    """Tabulates the medians of cold and warm starts."""
    return [_medians(result).sheet("times of a start")] if result else []


def plot(ax: "Axes", result: list[StartTime]) -> None:
    """Draws the medians."""
    rows = _medians(result).rows()
    labels = [
        f"{lab.format_seconds(x['wall_s'])}, first answer "
        f"{lab.format_seconds(x['first_s'])}"
        for x in rows
    ]
    names = [f"{x['kind']} start" for x in rows]
    draw_bars(ax, names, [x["wall_s"] for x in rows], labels)
    lab.set_labels(ax, "From the process to its answers", "wall time [s]", "")


STUDY = lab.Study(
    CONFIGS, list, run, plot, summary=summary, panels=lab.Panels(1, 1, 2.4)
)
