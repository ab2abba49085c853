"""How soon, and how well, is a load stage of a vLLM server predicted?

jaxkv simulates a window of the stage for all draws of a posterior at once, and for its
mode. BLIS replays the same requests; AIConfigurator computes a steady state. All
systems answer in rotation; a ratio is the median of the rounds' ratios. Every answer is
the mean end-to-end and the median first-token time of the requests in the window.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from experiments import lab
from experiments.bench.tables import draw_bars
from experiments.harness import PeerProcess, start_peers
from jaxkv import clock
from jaxkv.serving import without_program_cache
from scaling import shapes
from scaling.calibration import (
    PUBLISHED_SERVERS,
    MeasuredStage,
    ServerPosterior,
    StageLatencies,
    draw_coefficients,
    load_posterior,
    make_stage_load,
    predict_stage,
    read_measured_stages,
    simulate_stage,
    take_draws,
)
from scaling.cli import find_measured_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEER_SCRIPT = Path(__file__).with_name("peer_script.py")
PUBLISHED_ERRORS = (
    (
        "BLIS, trained-physics",
        "6.7 %, median of 36 runs of 6 models that its fit left out",
        "inference-sim, docs/blog/posts/how-blis-learns-latency.md, August 2026",
    ),
    (
        "Vidur",
        "up to 7 times off on current servers",
        "as reported with the measurements of inference-sim/training",
    ),
    (
        "roofline without fitted overheads",
        "29 to 42 %",
        "as reported with the measurements of inference-sim/training",
    ),
)
"""Published end-to-end errors of simulators, whether or not they are installed."""
NOT_RUN = (
    "Vidur is not run: its package 0.0.26 reads profiles of kernels from a hub of data "
    "sets when it starts, and lists Llama-3-8B and 70B only."
)


class Config(lab.ConfigRecord):
    """Measured stages, coefficients and peers."""

    runs: str = ""
    """CSV of measured load stages; empty for vllm_h100/runs.csv in the folder that the
    environment variable JAXKV_DATA names."""
    stages: tuple[str, ...] = ("llama-2-7b-tp1-general/0",)
    """Ends of the names of stages, which are run/index; () for all that are not
    overloaded."""
    coefficients: Path | None = None
    """Posterior of a server, as `jaxkv calibrate` writes it; None for the published
    one."""
    draws: lab.PositiveInt = 32
    """Draws of the posterior that are simulated together."""
    rounds: lab.PositiveInt = 5
    """Turns of every system, after its first answer."""
    peer_python: Path | None = None
    """Python interpreter with aiconfigurator, which is timed."""
    blis: Path | None = None
    """Folder of BLIS's source with its built program `blis`, which is timed."""


CONFIGS = {"stage": Config()}


class StageAnswers(lab.ResultTable):
    """Answers of each system for each stage."""

    stage: lab.Texts = lab.column("name of the stage")
    system: lab.Texts = lab.column("name of the simulator")
    first_s: lab.Floats = lab.column(
        "first answer, with compilation", heading="first answer"
    )
    seconds: lab.Floats = lab.column(
        "median of later answers", heading="later answers", form=lab.format_seconds
    )
    cpu_s: lab.Floats = lab.column(
        "the same in processor time", heading="processor time"
    )
    ratio: lab.Floats = lab.column(
        "time / that of all draws of jaxkv", heading="over jaxkv", form="{:.2f}x"
    )
    end_to_end_s: lab.Floats = lab.column("mean end-to-end time", heading="end to end")
    first_token_s: lab.Floats = lab.column(
        "median first-token time", heading="first token"
    )
    measured_s: lab.Floats = lab.column("measured end-to-end time", is_reported=False)
    measured_first_s: lab.Floats = lab.column(
        "measured first-token time", is_reported=False
    )
    fitted: lab.Texts = lab.column("stages that the coefficients were fitted to")
    absent: lab.Texts = lab.column("reason for a missing answer")

    @property
    @lab.computed_column(heading="error", form=lab.format_percent)
    def error(self) -> np.ndarray:
        """Relative error of the end-to-end time; NaN if none was measured."""
        return self.end_to_end_s / self.measured_s - 1

    @property
    @lab.computed_column(heading="error, first token", form=lab.format_percent)
    def first_error(self) -> np.ndarray:
        """Relative error of the first-token time."""
        return self.first_token_s / self.measured_first_s - 1


class Result(lab.ResultRecord):
    """Answers of all systems."""

    answers: StageAnswers = lab.column("answers of each system for each stage")


class StageAnswer(NamedTuple):
    """Times of an answer, and the predicted latencies, in s."""

    seconds: float
    cpu_s: float
    end_to_end_s: float
    first_token_s: float


type System = Callable[[MeasuredStage], StageAnswer]


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Times all systems on one stage after another; if stopped, keeps the finished.

    Raises:
      ValueError: the table or the coefficients cannot be read, a stage is unknown, or a
        peer is absent.
    """
    posterior = load_posterior(config.coefficients or PUBLISHED_SERVERS)
    posterior = take_draws(posterior, config.draws)
    stages = find_stages(config)
    rows: list[list[object]] = []
    with contextlib.ExitStack() as stack:
        systems = _own_systems(posterior) | _start_peers(config, stack)
        for stage in progress.track(stages, "stages", "stages"):
            rows += _compare(stage, systems, posterior, config.rounds, progress)
            if progress.stopped:
                break
    return Result(answers=StageAnswers.of(rows))


def find_stages(config: Config) -> list[MeasuredStage]:
    """Returns the stages that a config names.

    Raises:
      ValueError: the table cannot be read, or a name is the end of none or of several
        stages.
    """
    path = find_measured_runs(config.runs)
    all_stages = read_measured_stages(path)
    if not config.stages:
        return [stage for stage in all_stages if not stage.is_overloaded]
    stages = []
    for name in config.stages:
        matches = [stage for stage in all_stages if stage.name.endswith(name)]
        if len(matches) != 1:
            names = ", ".join(stage.name for stage in matches or all_stages)
            raise ValueError(
                f"{path}: stages={name!r} must be the end of one of {names}"
            )
        stages += matches
    return stages


def _own_systems(posterior: ServerPosterior) -> dict[str, System]:
    mode = draw_coefficients(posterior.mode[None])

    def timed(predict: Callable[[MeasuredStage], StageLatencies]) -> System:
        def answer(stage: MeasuredStage) -> StageAnswer:
            start = time.perf_counter()
            cpu = time.process_time()
            latencies = predict(stage)
            taken = time.perf_counter() - start, time.process_time() - cpu
            middle = (np.median(x) for x in (latencies[0].mean, latencies[1].median))
            return StageAnswer(*taken, *map(float, middle))

        return answer

    num = len(posterior.deviations)
    return {
        f"jaxkv, {num} draws": timed(lambda stage: predict_stage(stage, posterior)),
        "jaxkv, mode": timed(lambda stage: simulate_stage(stage, mode)),
    }


def _start_peers(config: Config, stack: contextlib.ExitStack) -> dict[str, System]:
    tables = {"AIConfigurator": (PEER_SCRIPT, "AIConfigurator")}
    replays = {
        name: (PEER_SCRIPT, "Blis", config.blis, model)
        for name, model in (
            ("BLIS", "trained-physics"),
            ("BLIS, roofline", "roofline"),
        )
    }
    python = Path(sys.executable) if config.blis else None
    processes: list[PeerProcess] = []
    for interpreter, peers in ((python, replays), (config.peer_python, tables)):
        processes += start_peers(stack, PeerProcess, interpreter, peers, needed=True)[0]

    def make_system(peer: PeerProcess) -> System:
        def answer(stage: MeasuredStage) -> StageAnswer:
            reply = peer.ask(make_question(stage))
            return StageAnswer(*(reply[name] for name in StageAnswer._fields))

        return answer

    return {f"{peer.name} ({peer.version})": make_system(peer) for peer in processes}


def make_question(stage: MeasuredStage) -> dict[str, object]:
    """Returns the question of `peer_script` for the requests that jaxkv simulates."""
    load = make_stage_load(stage)
    w = load.workload
    assert w.context is not None
    cached = np.asarray(w.context)
    columns = (
        np.asarray(w.arrival, np.int64) @ [clock.MICROS_PER_SECOND, 1],
        np.asarray(w.prompt) + cached,
        cached,
        np.asarray(w.output),
        load.is_measured,
    )
    names = ("model", "device", "tensor_parallel", "max_model_len", "block_size")
    names += ("max_num_batched_tokens", "max_num_seqs", "num_prompts", "rate_per_s")
    return {name: getattr(stage, name) for name in names} | {
        "config": shapes.CONFIGS[shapes.describe_checkpoint(stage.model).name],
        "requests": [*zip(*(x.tolist() for x in columns), strict=True)],
    }


def _compare(
    stage: MeasuredStage,
    systems: dict[str, System],
    posterior: ServerPosterior,
    rounds: int,
    progress: lab.Progress,
) -> list[list[object]]:
    """Returns a row for each system; none if stopped before the last round."""
    answers: dict[str, list[StageAnswer]] = {name: [] for name in systems}
    absent: dict[str, str] = {}
    jax.clear_caches()
    for index in range(1 + rounds):
        if progress.stopped:
            return []
        for name, system in systems.items():
            if name in absent:
                continue
            progress.show(f"{stage.name}, {name}")
            cache_scope = (
                without_program_cache() if not index else contextlib.nullcontext()
            )
            try:
                with cache_scope:
                    answers[name].append(system(stage))
            except ValueError as error:
                if name.startswith("jaxkv"):
                    raise
                absent[name] = str(error)
    end_to_end = stage.end_to_end_s
    first = stage.first_token_s
    measured = [
        np.nan if end_to_end is None else end_to_end.mean,
        np.nan if first is None else first.median,
    ]
    base = [x.seconds for x in next(iter(answers.values()))[1:]]
    fit_note = "all" if stage.name in posterior.stages else "without this one"
    rows = []
    for name, system_answers in answers.items():
        if name in absent:
            numbers = [np.nan] * 6
        else:
            later = system_answers[1:]
            ratios = [x.seconds / y for x, y in zip(later, base, strict=True)]
            numbers = [system_answers[0].seconds]
            numbers += [statistics.median(x[i] for x in later) for i in (0, 1)]
            numbers += [statistics.median(ratios), *later[0][2:]]
        fitted = f"{len(posterior.stages)} stages, {fit_note}"
        rows.append(
            [
                *(stage.name, name, *numbers, *measured),
                fitted if name.startswith("jaxkv") else "see its source",
                absent.get(name, ""),
            ]
        )
    return rows


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns the answers, and the published errors of simulators."""
    answers = result.answers
    parts = list[lab.ReportPart]()
    if len(answers):
        shown = ("stage", "system", "first_s", "seconds", "cpu_s", "ratio")
        shown += ("end_to_end_s", "error", "first_token_s", "first_error", "fitted")
        if any(answers.absent):
            shown += ("absent",)
        parts.append(answers.sheet("one load stage of a vLLM server", *shown))
    heads = ("simulator", "end-to-end error", "source")
    return [*parts, lab.Sheet("published errors", heads, PUBLISHED_ERRORS, NOT_RUN)]


def plot(ax: "Axes", result: Result) -> None:
    """Draws the time of every system for the first stage."""
    answers = result.answers
    if len(answers):
        answers = answers.where(stage=answers.stage[0])
        answers = answers.at(np.flatnonzero(np.isfinite(answers.seconds)))
    labels = [
        f"{lab.format_seconds(s)}, {100 * error:+.1f} %"
        for s, error in zip(answers.seconds, answers.error, strict=True)
    ]
    draw_bars(ax, answers.system.tolist(), answers.seconds.tolist(), labels)
    ax.margins(x=0.3)
    title = "Time of an answer, and its end-to-end error"
    lab.set_labels(ax, title, "time of an answer [s]", "")


STUDY = lab.Study(
    CONFIGS, Result, run, plot, summary=summary, panels=lab.Panels(1, 1, 2.8)
)
