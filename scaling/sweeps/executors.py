"""Where a sweep's runs are carried out: in this process, or on a Ray cluster.

The only door to ray, an extra. Whoever carries a run out, its record is made here.
"""

import functools
import logging
import math
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv import validation
from jaxkv.models import transformer
from scaling.corpora import Corpus, corpora
from scaling.sweeps import branching, grid
from scaling.sweeps.branching import FinishedRun
from scaling.sweeps.grid import Cell, RunGroup, SweepConfig
from scaling.sweeps.paused import load_paused, save_paused
from scaling.training import TrainConfig, objectives

_PATIENCE_S = 2.0
"""How long each way of carrying out several runs is tried."""
_CONNECT_S = 10.0


class RunRecord(NamedTuple):
    """A run that is over, as a sweep's folder keeps it.

    Attributes:
      record: as `folder.RECORD` describes it, but for the commit.
      curve: lines of `curves.jsonl`.
      model: its shape.
      params: as NumPy arrays; None unless done.
    """

    record: dict[str, Any]
    curve: list[dict[str, Any]]
    model: Any
    params: transformer.Params | None


class ExecutionMode(NamedTuple):
    """How runs of one model are carried out.

    Attributes:
      mode: `loop` or `vmap`.
      reason: why, in words.
    """

    mode: str
    reason: str


def open_on_device(config: corpora.AnyCorpus) -> Corpus:
    """Opens the text and puts its stream on the device."""
    corpus = corpora.open_corpus(config)
    return corpus._replace(stream=jnp.asarray(corpus.stream))


def choose_mode(
    config: SweepConfig, groups: list[RunGroup], corpus: Corpus
) -> ExecutionMode:
    """Decides between running one after another and side by side, by a short trial.

    The trial is of the middle group that has several lanes.
    """
    if config.mode != "auto":
        return ExecutionMode(config.mode, "asked for")
    several = [group for group in groups if len(group.lanes) > 1]
    if not several:
        return ExecutionMode("loop", "no model has several runs of one length")
    if config.executor == "ray":
        return ExecutionMode("loop", "a cluster has other runs side by side")
    group = several[len(several) // 2]
    cell = Cell(group.model, group.horizons[-1])
    runs = [grid.train_config(config, cell, lane) for lane in group.lanes]
    tokens = config.batch_size * config.seq_len
    loop = branching.measure_speed(
        runs[:1], corpus, is_vmapped=False, patience_s=_PATIENCE_S
    )
    vmap = branching.measure_speed(
        runs, corpus, is_vmapped=True, patience_s=_PATIENCE_S
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
    advance: Callable[[int, Any], bool],
    paused: Path,
) -> Iterator[RunRecord]:
    """Carries out groups in this process, by the mode `loop` or `vmap`.

    `advance` is told how many steps of which model were taken; false stops. `paused` is
    a folder for what is under way then, to go on from there.

    Yields:
      The runs, until they end or somebody stops them.

    Raises:
      ValueError: what is under way cannot be written or read.
    """
    for group in groups:
        parts = [group.lanes]
        if mode == "loop":
            parts = [(lane,) for lane in group.lanes]

        def advance_model(steps: int, model: Any = group.model) -> bool:
            return advance(steps, model)

        for lanes in parts:
            if not advance_model(0):  # before a program is compiled for nothing
                return
            part = group._replace(lanes=lanes)
            place = paused / grid.group_id(config, part, corpus.digest)
            try:
                yield from _run(
                    config, part, corpus, mode == "vmap", advance_model, place
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
        [grid.train_config(config, Cell(group.model, n), x) for x in group.lanes]
        for n in group.horizons
    ]
    half = None
    if paused is not None and paused.exists():
        begun = branching.init_runs(horizons[-1], is_vmapped)
        if half := load_paused(paused, begun.state):
            advance(len(group.lanes) * (half.branch or half.trunk).step)
    found = branching.train_branches(
        horizons,
        corpus,
        is_vmapped=is_vmapped,
        score=functools.partial(score_run, config, corpus),
        advance=advance,
        half=half,
    )
    for finished in found:
        yield make_record(config, corpus, finished)


def score_run(
    config: SweepConfig, corpus: Corpus, run: TrainConfig, params: transformer.Params
) -> objectives.StreamScore:
    """Scores a run as all of a sweep are scored."""
    return objectives.score_stream(
        params,
        corpus.held_out,
        model=run.model,
        seq_len=run.seq_len,
        num_windows=config.num_eval_windows,
    )


def connect_ray(config: SweepConfig) -> Any:
    """Joins the cluster of a sweep that is to be carried out on one.

    Returns:
      Ray, the module; None for another executor.

    Raises:
      ValueError: ray is not installed, or the cluster cannot be reached.
    """
    if config.executor != "ray":
        return None
    validation.installed("executor ray", "ray", "ray")
    import ray

    if ray.is_initialized():
        return ray
    try:
        host, colon, port = config.ray_address.rpartition("//")[2].rpartition(":")
        if colon and port.isdigit():  # where there is no cluster Ray tries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        with warnings.catch_warnings():
            # Jax warns of every fork; what Ray forks is another program at once.
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
    advance: Callable[[int, Any], bool],
) -> Iterator[RunRecord]:
    """Carries out groups on a Ray cluster, a lane of a group on one worker at a time.

    Every worker opens the text for itself, so all of them must see it. `advance` is
    told how many steps of which model were taken; false stops.

    Yields:
      The runs in the order in which they end; a task whose worker died is tried again
      elsewhere by Ray, three times.

    Raises:
      ValueError: as `connect_ray` does.
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
                steps = grid.group_steps(config, part.horizons)
                yield from ray.get(reference)
                if not advance(steps, part.model):
                    return
            if not ready and not advance(0, parts[0].model):
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
    """Writes down a run that is over, and its curve."""
    run, score = finished.run, finished.score
    params, per_token = grid.count_cost(run.model, run.seq_len)
    batch_tokens = run.batch_size * run.seq_len
    num_tokens = run.num_steps * batch_tokens
    run_id = grid.run_id(config, run, corpus.digest)
    kind = getattr(run.model, "family", None) or getattr(run.model, "kind", None)
    bits = None
    if score is not None and math.isfinite(corpus.bytes_per_token):
        bits = score.loss / math.log(2) / corpus.bytes_per_token
    record = {
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
        "learning_rate": run.learning_rate,
        "batch_tokens": batch_tokens,
        "seq_len": run.seq_len,
        "seed": run.seed,
        "seconds": finished.seconds,
        "device": jax.devices()[0].device_kind,
        "error": finished.error,
    }
    curve = [
        {
            "run_id": run_id,
            "step": step,
            "num_tokens": step * batch_tokens,
            "flops": per_token * step * batch_tokens,
            "loss": loss,
        }
        for step, loss in finished.curve
    ]
    return RunRecord(record, curve, run.model, finished.params)
