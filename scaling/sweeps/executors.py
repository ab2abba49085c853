"""Executors of a sweep: this process, or a Ray cluster.

The only module that imports ray, an optional dependency. Both executors make the same
records.
"""

import functools
import logging
import math
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv import validation
from jaxkv.disaggregation import CLUSTER_ENVIRONMENT
from jaxkv.models import Params
from scaling.corpora import AnyCorpus, Corpus, open_corpus
from scaling.sweeps import branching, grid
from scaling.sweeps.branching import FinishedRun
from scaling.sweeps.folder import CurveRow, RecordRow
from scaling.sweeps.grid import RunGroup, SweepConfig
from scaling.sweeps.paused import load_paused, save_paused
from scaling.training import Architecture, StreamScore, TrainConfig, score_stream

_EXIT_TIMEOUT_S = 2.0
"""Duration of the trial of each mode, in seconds."""
_CONNECT_S = 10.0


class RunRecord(NamedTuple):
    """A completed run, in the form of a sweep's folder.

    Attributes:
      record: record with the columns of `folder.RECORD`; the commit is empty.
      curve: lines of `curves.jsonl`.
      model: config of the model.
      params: parameters as NumPy arrays; None unless done.
    """

    record: RecordRow
    curve: list[CurveRow]
    model: Architecture
    params: Params | None


class ExecutionMode(NamedTuple):
    """Mode of execution for runs of one model.

    Attributes:
      mode: `loop` or `vmap`.
      reason: reason for the choice, in words.
    """

    mode: str
    reason: str


def open_on_device(config: AnyCorpus) -> Corpus:
    """Opens the corpus and puts its stream on the device."""
    corpus = open_corpus(config)
    return corpus._replace(stream=jnp.asarray(corpus.stream))


def choose_mode(
    config: SweepConfig, groups: list[RunGroup], corpus: Corpus
) -> ExecutionMode:
    """Chooses between sequential and vmapped runs, by a short trial.

    The trial uses the middle group among those with several lanes.
    """
    if config.mode != "auto":
        return ExecutionMode(config.mode, "asked for")
    several = [group for group in groups if len(group.lanes) > 1]
    if not several:
        return ExecutionMode("loop", "no model has several runs of one length")
    if config.executor == "ray":
        return ExecutionMode("loop", "a cluster has other runs side by side")
    group = several[len(several) // 2]
    runs = [grid.train_config(config, group.cells[-1], lane) for lane in group.lanes]
    tokens = group.setting.batch_size * config.seq_len
    loop = branching.measure_speed(
        runs[:1], corpus, is_vmapped=False, patience_s=_EXIT_TIMEOUT_S
    )
    vmap = branching.measure_speed(
        runs, corpus, is_vmapped=True, patience_s=_EXIT_TIMEOUT_S
    )
    width = group.model.hidden_size
    return ExecutionMode(
        "loop" if loop >= vmap else "vmap",
        f"at width {width} one after another train {loop * tokens:,.0f} tokens/s, "
        f"{len(runs)} side by side {vmap * tokens:,.0f}",
    )


def run_local(
    config: SweepConfig,
    groups: list[RunGroup],
    corpus: Corpus,
    mode: str,
    advance: Callable[[int, RunGroup], bool],
    paused: Path,
) -> Iterator[RunRecord]:
    """Executes groups in this process, in mode `loop` or `vmap`.

    `advance` is called with a number of steps and their group; it returns False to
    stop. `paused` is a folder for the state of stopped runs, from which they continue.

    Yields:
      The runs, until all are complete or `advance` stops them.

    Raises:
      ValueError: the state of stopped runs cannot be written or read.
    """
    for group in groups:
        parts = [group.lanes]
        if mode == "loop":
            parts = [(lane,) for lane in group.lanes]

        def advance_group(steps: int, group: RunGroup = group) -> bool:
            return advance(steps, group)

        for lanes in parts:
            if not advance_group(0):  # stops before compiling a program
                return
            part = group._replace(lanes=lanes)
            place = paused / grid.group_id(config, part, corpus.digest)
            try:
                yield from _run(
                    config, part, corpus, mode == "vmap", advance_group, place
                )
            except branching.StopRequested as stop:
                save_paused(place, stop.half)
                return
            shutil.rmtree(place, ignore_errors=True)


def _run(
    config: SweepConfig,
    group: RunGroup,
    corpus: Corpus,
    is_vmapped: bool,
    advance: Callable[[int], bool],
    paused: Path | None = None,
) -> Iterator[RunRecord]:
    horizons = [
        [grid.train_config(config, cell, x) for x in group.lanes]
        for cell in group.cells
    ]
    half = None
    if paused is not None and paused.exists():
        begun = branching.init_runs(horizons[-1], is_vmapped)
        if half := load_paused(paused, begun.state):
            advance(len(group.lanes) * (half.branch or half.trunk).step)
    finished_runs = branching.train_branches(
        horizons,
        corpus,
        is_vmapped=is_vmapped,
        score=functools.partial(score_run, config, corpus),
        advance=advance,
        half=half,
    )
    for finished in finished_runs:
        yield make_record(config, corpus, finished)


def score_run(
    config: SweepConfig, corpus: Corpus, run: TrainConfig, params: Params
) -> StreamScore:
    """Scores a run on the sweep's held-out windows."""
    return score_stream(
        params,
        corpus.held_out,
        model=run.scaled_model,
        seq_len=run.seq_len,
        num_windows=config.num_eval_windows,
    )


def connect_ray(config: SweepConfig) -> Any:
    """Connects to the Ray cluster of a sweep.

    Returns:
      The module ray; None for another executor.

    Raises:
      ValueError: ray is not installed, or the cluster is not reachable.
    """
    if config.executor != "ray":
        return None
    validation.check_installed("executor ray", "ray", "ray")
    os.environ.update(CLUSTER_ENVIRONMENT | os.environ)
    import ray

    if ray.is_initialized():
        return ray
    try:
        host, colon, port = config.ray_address.rpartition("//")[2].rpartition(":")
        if colon and port.isdigit():  # without a cluster Ray retries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        with warnings.catch_warnings():
            # JAX warns of every fork; Ray's forks execute another program at once.
            warnings.filterwarnings("ignore", r"os\.fork", RuntimeWarning)
            ray.init(
                address=config.ray_address or None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (OSError, ValueError, RuntimeError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ValueError(f"{config.ray_address=}: no cluster: {line}") from None
    return ray


def run_on_ray(
    config: SweepConfig,
    groups: list[RunGroup],
    advance: Callable[[int, RunGroup], bool],
) -> Iterator[RunRecord]:
    """Executes groups on a Ray cluster, each lane of a group as one task.

    Every worker opens the corpus itself, so its files must exist on all of them.
    `advance` is called with a number of steps and their group; it returns False to
    stop.

    Yields:
      The runs in the order of completion; Ray retries a task whose worker died up to
      three times.

    Raises:
      ValueError: see `connect_ray`.
    """
    ray = connect_ray(config)
    task = ray.remote(
        num_cpus=config.cpus_per_run, num_gpus=config.gpus_per_run, max_retries=3
    )(_on_worker)
    parts = [group._replace(lanes=(x,)) for group in groups for x in group.lanes]
    waiting = {task.remote(config, part): part for part in parts}
    try:
        while waiting:
            ready, _ = ray.wait([*waiting], num_returns=1, timeout=1.0)
            for reference in ready:
                part = waiting.pop(reference)
                steps = grid.group_steps(config, part)
                yield from ray.get(reference)
                if not advance(steps, part):
                    return
            if not ready and not advance(0, parts[0]):
                return
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def _on_worker(config: SweepConfig, part: RunGroup) -> list[RunRecord]:
    corpus = _opened(config)
    return [*_run(config, part, corpus, False, lambda steps: True)]


@functools.lru_cache(maxsize=1)
def _opened(config: SweepConfig) -> Corpus:
    return open_on_device(config.corpus)


def make_record(
    config: SweepConfig, corpus: Corpus, finished: FinishedRun
) -> RunRecord:
    """Makes the record and the curve of a completed run."""
    run = finished.run
    score = finished.score
    params, per_token = grid.count_cost(run.model, run.seq_len)
    batch_tokens = run.batch_size * run.seq_len
    num_tokens = run.num_steps * batch_tokens
    run_id = grid.run_id(config, run, corpus.digest)
    kind = getattr(run.model, "family", None) or getattr(run.model, "kind", None)
    bits = None
    if score is not None and math.isfinite(corpus.bytes_per_token):
        bits = score.loss / math.log(2) / corpus.bytes_per_token
    record: RecordRow = {
        "run_id": run_id,
        "cell": grid.cell_id(config, run, corpus.digest),
        "status": finished.status,
        "architecture": str(kind or type(run.model).__name__),
        "hidden_size": run.model.hidden_size,
        "num_layers": run.model.num_layers,
        "num_params": params.total,
        "num_params_non_embedding": params.non_embedding,
        "num_params_matmul": params.matmul,
        "num_params_active": params.active,
        "num_steps": run.num_steps,
        "num_tokens": num_tokens,
        "num_unique_tokens": min(num_tokens, len(corpus.stream)),
        "epochs": num_tokens / len(corpus.stream),
        "flops": per_token * num_tokens,
        "flops_6nd": 6 * params.total * num_tokens,
        "loss": None if score is None else score.loss,
        "loss_se": None if score is None else score.loss_se,
        "bits_per_byte": bits,
        "decayed": run.cooldown_steps > 0,
        "schedule": run.schedule,
        "optimizer": run.optimizer.kind,
        "parametrization": run.parametrization,
        "weight_decay": run.optimizer.weight_decay,
        "learning_rate": run.learning_rate,
        "batch_tokens": batch_tokens,
        "seq_len": run.seq_len,
        "seed": run.seed,
        "seconds": finished.seconds,
        "device": jax.devices()[0].device_kind,
        "commit": "",
        "error": finished.error,
    }
    curve: list[CurveRow] = [
        {
            "run_id": run_id,
            "step": step,
            "num_tokens": step * batch_tokens,
            "flops": per_token * step * batch_tokens,
            "loss": loss,
        }
        for step, loss in finished.curve
    ]
    return RunRecord(record, curve, run.scaled_model, finished.params)
