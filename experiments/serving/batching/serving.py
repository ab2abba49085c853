"""The sweeps that a real model can serve on this machine: spread, and clients."""

import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from experiments.harness import bundled
from experiments.harness.prompts import held_out
from experiments.serving.batching import sweeps
from experiments.serving.batching.sweeps import (
    PAGE_SIZE,
    SYSTEMS,
    Latencies,
    Result,
    Speeds,
)
from jaxkv.engine import state
from jaxkv.models import checkpoints, paged
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs, interface, static_batching
from jaxkv.serving.engine import Engine
from jaxkv.workloads import Workload

if TYPE_CHECKING:
    from experiments.serving.batching.experiment import Config

TOKEN_BUDGET, ROUNDS = 64, 3
"""Rows of a step; and times that everything is served, of which the fastest counts."""


def run(config: "Config", progress: Progress) -> Result:
    """Serves both sweeps; what the person stops is not a number."""
    folder = bundled.folder_of(config.model)
    model = checkpoints.load_model(folder)
    if model.tokenizer is None:
        raise ValueError(f"{config.model}: has no tokenizer, so no text to go on with")
    if config.longest > model.config.max_positions:
        raise ValueError(
            f"{config.longest} tokens are more than {model.config.max_positions=}"
        )
    times = sweeps.pictures(config, progress)
    slots = sweeps.num_reserved(config, config.longest)
    none = np.zeros((len(SYSTEMS), 0, config.num_seeds))
    return Result(
        Speeds(np.zeros(0), none, none, none[0]),
        _uneven(config, model, slots, progress),
        _side_by_side(config, model, progress),
        *times,
        where=jax.devices()[0].device_kind,
        num_slots=slots,
    )


def _uneven(
    config: "Config", model: checkpoints.Loaded, slots: int, progress: Progress
) -> Speeds:
    """Serves outputs of equal means, more and more uneven, under both policies."""
    loads = sweeps.spread(config)
    shape = (2, len(loads), config.num_seeds)
    rates, steps = np.full(shape, np.nan), np.full(shape, np.nan)
    engines = [
        _engine(config, model, slots, policy)
        for policy in (static_batching.static(), fcfs.fcfs())
    ]
    for engine, name in zip(engines, SYSTEMS, strict=False):
        progress.show(f"{name}: compiling")
        _serve(engine, model, loads[0][0], 0)
    for i in progress.track(range(len(loads)), "uneven outputs", "loads"):
        for seed, load in enumerate(loads[i]):
            # In turns, so that both meet the same neighbours on the machine.
            found = np.array(
                [
                    [_serve(engine, model, load, seed) for engine in engines]
                    for _ in range(ROUNDS)
                ]
            )
            rates[:, i, seed] = int(load.output.sum()) / found[..., 0].min(axis=0)
            steps[:, i, seed] = found[0, :, 1]
    drawn = [[np.asarray(load.output) for load in row] for row in loads]
    spread = np.array([[x.std() / x.mean() for x in row] for row in drawn])
    return Speeds(np.array(config.deviations), rates, steps, spread)


def _side_by_side(
    config: "Config", model: checkpoints.Loaded, progress: Progress
) -> Latencies:
    """Serves equal requests in batches of several sizes."""
    num = round(config.mean_output_tokens)
    rates, latencies = [], []
    for clients in progress.track(config.clients, "side by side", "sizes"):
        progress.show(f"{clients} side by side: compiling")
        engine = _engine(config, model, clients, fcfs.fcfs())
        load = sweeps.equal(config.prompt_tokens, num, clients, rounds=1)
        seconds = [_serve(engine, model, load, 0)[0] for _ in range(ROUNDS + 1)]
        rates.append(clients * num / min(seconds[1:]))
        latencies.append(min(seconds[1:]) / num)
    done = np.array(config.clients[: len(rates)])
    return Latencies(done, np.array(rates), np.array(latencies))


def _engine(
    config: "Config",
    model: checkpoints.Loaded,
    slots: int,
    policy: interface.Policy,
) -> Engine:
    """An engine whose pool holds the longest sequence in every slot."""
    pages_per_slot = -(-config.longest // PAGE_SIZE)
    num = max(config.num_requests, slots)
    bounds = state.EngineConfig(
        num_pages=slots * pages_per_slot,
        page_size=PAGE_SIZE,
        max_slots=slots,
        max_length=config.longest,
        max_sequences=num,
        queue_capacity=num,
        submit_width=num,
        token_budget=max(TOKEN_BUDGET, slots),
    )
    return Engine(
        model.params,
        paged.PagedForward(model.config, bounds.numerics),
        paged.make_pages(model.config, bounds),
        bounds,
        policy=policy,
        keep_trace=True,
    )


def _serve(
    engine: Engine, model: checkpoints.Loaded, load: Workload, seed: int
) -> tuple[float, int]:
    """Serves a load whose requests are all there: seconds, and steps that fed rows."""
    sizes: Any = np.asarray(load.prompt).tolist()
    asks = [
        Sampling(temperature=0.0, max_tokens=most, ignore_eos=True)
        for most in np.asarray(load.output).tolist()
    ]
    rng = np.random.default_rng(seed)
    prompts = held_out(model.tokenizer, sizes, asks, rng)
    engine.trace.clear()
    start_s = time.perf_counter()
    engine.generate([x.tokens for x in prompts], asks)
    seconds = time.perf_counter() - start_s
    return seconds, sum(int(info.num_rows.any(1).sum()) for info in engine.trace)
