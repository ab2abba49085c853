"""Serves the spread and client sweeps with a real model on this machine."""

import time
from collections.abc import Iterator

import numpy as np

from experiments import lab
from experiments.harness import cut_held_out_prompts, make_benchmark_config, make_engine
from experiments.serving.batching import sweeps
from experiments.serving.batching.sweeps import PAGE_SIZE, SYSTEMS, Config, LoadResult
from jaxkv import scheduling
from jaxkv.models import LoadedModel
from jaxkv.sampling import Sampling
from jaxkv.scheduling import Policy
from jaxkv.serving import Engine
from jaxkv.workloads import Workload

TOKEN_BUDGET = 64
NUM_ROUNDS = 3
"""Rows of a step, and servings of each load, of which the fastest counts."""


def serve_uneven(
    config: Config, model: LoadedModel, progress: lab.Progress
) -> list[list[LoadResult]]:
    """Serves outputs of equal mean and growing spread.

    Returns:
      The runs of static and of continuous batching, by deviation and seed; NaN for
      loads that were not reached before the user stopped.
    """
    loads = [load for load, _ in sweeps.spread_loads(config)]
    slots = sweeps.num_reserved_slots(config, config.longest)
    engines = [
        _engine(config, model, slots, policy)
        for policy in (scheduling.static(), scheduling.fcfs())
    ]
    for engine, name in zip(engines, SYSTEMS, strict=False):
        progress.show(f"{name}: compiling")
        _serve(engine, model, loads[0], 0)
    outputs = [np.asarray(load.output) for load in loads]
    runs = [[LoadResult(x) for x in outputs] for _ in engines]
    for i in progress.track(range(len(loads)), "uneven outputs", "loads"):
        # The policies alternate, so that both see the same load of the machine.
        timings = np.array(
            [
                [_serve(x, model, loads[i], i % config.num_seeds) for x in engines]
                for _ in range(NUM_ROUNDS)
            ]
        )
        for row, seconds, steps in zip(runs, *timings.min(axis=0).T, strict=True):
            row[i] = LoadResult(outputs[i], int(outputs[i].sum()) / seconds, steps)
    return runs


def serve_batches(
    config: Config, model: LoadedModel, progress: lab.Progress
) -> Iterator[LoadResult]:
    """Serves equal requests in batches of each size, until stopped."""
    num = round(config.mean_output_tokens)
    for clients in progress.track(config.clients, "side by side", "sizes"):
        progress.show(f"{clients} side by side: compiling")
        engine = _engine(config, model, clients, scheduling.fcfs())
        load = sweeps.equal_requests(config.prompt_tokens, num, clients, rounds=1)
        served = [_serve(engine, model, load, 0) for _ in range(NUM_ROUNDS + 1)]
        seconds, steps = min(served[1:])
        output = np.asarray(load.output)
        yield LoadResult(
            output, clients * num / seconds, steps, s_per_token=seconds / num
        )


def _engine(config: Config, model: LoadedModel, slots: int, policy: Policy) -> Engine:
    """Builds an engine whose pool holds the longest sequence in every slot."""
    num = max(config.num_requests, slots)
    bounds = make_benchmark_config(
        slots,
        config.longest,
        page_size=PAGE_SIZE,
        max_sequences=num,
        queue_capacity=num,
        submit_width=num,
        token_budget=max(TOKEN_BUDGET, slots),
    )
    return make_engine(model, bounds, has_text=False, policy=policy)


def _serve(
    engine: Engine, model: LoadedModel, load: Workload, seed: int
) -> tuple[float, int]:
    """Serves a load in one burst; returns seconds and the number of non-empty steps."""
    samplings = [
        Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for max_tokens in np.asarray(load.output).tolist()
    ]
    rng = np.random.default_rng(seed)
    sizes = np.asarray(load.prompt).tolist()
    requests = cut_held_out_prompts(model.tokenizer, [*sizes], samplings, rng)
    engine.trace.clear()
    start_s = time.perf_counter()
    engine.generate([x.tokens for x in requests], samplings)
    seconds = time.perf_counter() - start_s
    return seconds, sum(int(info.num_rows.any(1).sum()) for info in engine.trace)
