"""What does it cost when requests give way, and what makes it cheap?

More requests run than the pool has pages for once they have grown. Then some give way:
their pages are lost and their tokens computed again, or the pages are moved to a buffer
beside the pool, and from there to host memory, and come back. A real model continues
real text, always the same requests, and only the policy and the memory change. All are
there when the clock starts; the model's own end token is ignored, so that lengths are
those asked for.

The recomputed share is tokens computed again / tokens computed. With `paper` no model
runs: a simulation serves OPT-13B's chat requests.
"""

import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from experiments.framework import Claim, Part
from experiments.harness import Request, bundled, prompts
from experiments.serving.preemption import (
    drawing,
    moving,
    numbers,
    published,
    results,
    serving,
    simulated,
    simulated_report,
)
from experiments.serving.preemption.results import Result
from experiments.serving.preemption.serving import Server, Way
from jaxkv import validation
from jaxkv.engine import state
from jaxkv.models import checkpoints
from jaxkv.progress import QUIET, Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import victims

PANELS = (2, 2)
PANEL_SIZE_INCHES = (3.6, 2.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The requests, and the memory that they are served in."""

    model: str = "stdlib-bytes"
    """A folder, or a bundled model."""
    num_requests: int = 48
    """Requests, all there when the clock starts."""
    prompt_tokens: tuple[int, int] = (16, 128)
    """Shortest and longest prompt."""
    output_tokens: tuple[int, int] = (48, 320)
    """Shortest and longest answer."""
    sigma: float = 0.6
    """Raggedness: standard deviation of the logarithm of both lengths."""
    pool_share: float = 0.4
    """Pages in the pool, as a share of those that the longest requests, as many as
    there are slots, need at their end."""
    pool_shares: tuple[float, ...] = (0.5, 0.3, 0.2)
    """Other sizes of the pool."""
    watermark_shares: tuple[float, ...] = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    """Pages kept free at admission, as shares of the pool."""
    swap_shares: tuple[float, ...] = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
    """Pages of the swap space, as shares of the pool."""
    host_share: float = 1 / 8
    """Pages of the buffer where the host takes part, as a share of the pool."""
    host_shares: tuple[float, ...] = (0.0, 1 / 16, 1.0)
    """Pages of swap space in host memory beside it, as shares of the pool."""
    repeats: int = 3
    """Servings of each way that is timed."""
    move_tokens: int = 512
    """Tokens of the one request that is brought back."""
    page_sizes: tuple[int, ...] = (1, 4, 16, 64)
    """Page sizes at which it is."""
    move_repeats: int = 30
    """Measurements of that."""
    temperature: float = 0.7
    """Of the draws."""
    top_p: float = 0.95
    """Of the draws."""
    max_slots: int = 16
    """Sequences that run at once."""
    page_size: int = 16
    """Token places in a page."""
    token_budget: int = 64
    """Rows that a step feeds at most."""
    steps_per_call: int = 16
    """Steps between two looks of the host."""
    numerics: Literal["fast", "reproducible"] = "reproducible"
    """Whether answers may depend, in rounding, on who gave way."""
    seed: int = 0
    """Of lengths, prompts and draws."""
    simulated_requests: int = 0
    """Requests served in simulated time, at the paper's scale; then no model runs."""

    def __post_init__(self) -> None:
        """Refuses what does not fit, or leaves nothing to measure."""
        counts = ("num_requests", "repeats", "move_tokens", "move_repeats", "page_size")
        validation.at_least(self, *counts, "max_slots", "steps_per_call")
        validation.ascending(
            self, "prompt_tokens", "output_tokens", low=1, strictly=False
        )
        validation.at_least(self, "sigma", "seed", "simulated_requests", low=0)
        validation.within(self, "pool_share", "host_share", low=0, high=1, ends="(]")
        validation.within(self, "pool_shares", low=0, high=1, ends="(]")
        validation.within(
            self, "watermark_shares", "swap_shares", "host_shares", low=0, high=1
        )
        validation.at_least(self, "page_sizes")

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence there may be."""
        return self.prompt_tokens[1] + self.output_tokens[1]


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        num_requests=16,
        prompt_tokens=(4, 16),
        output_tokens=(16, 40),
        pool_shares=(0.6, 0.5),
        watermark_shares=(0.0, 1 / 4),
        swap_shares=(0.0, 1 / 4, 1.0),
        host_shares=(0.0, 1.0),
        host_share=1 / 4,
        repeats=1,
        move_tokens=64,
        page_sizes=(4, 16),
        move_repeats=2,
        max_slots=6,
        page_size=4,
        token_budget=16,
        steps_per_call=4,
    ),
    "paper": Config(simulated_requests=1024),
}


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Serves everything; ended early, it has what is done."""
    if config.simulated_requests:
        found = simulated.measure(config.simulated_requests, config.seed, progress)
        return results.simulated_only(found)
    model = checkpoints.load_model(bundled.folder_of(config.model))
    if model.tokenizer is None:
        raise ValueError(f"{config.model}: has no tokenizer, so no text")
    longest = max(config.max_length, config.move_tokens + 1)
    if longest > model.config.max_positions:
        raise ValueError(
            f"{longest} tokens must be at most {model.config.max_positions=}"
        )
    progress.show("cutting prompts from files that the model has not seen")
    requests, moved = workload(config, model)
    server = Server(model, requests, progress)
    need = pages_needed(config, requests)
    pool = pages_of(config, config.pool_share, requests)
    base = bounds(config)
    wide, tight, narrow = (
        serving.bounds(base, *sizes)
        for sizes in (
            (need, need),
            (pool, pool),
            (pool, max(1, round(config.host_share * pool))),
        )
    )
    recompute = Way("recompute", pool)
    swap = Way("swap", pool, "swap", swap_pages=pool)
    ways = [(Way("room for all", need), wide)]
    for way in (recompute, swap):
        held = way._replace(name=f"{way.name}, hold new", hold_new=True)
        ways += [(way, tight), (held, tight)]
    chosen = [
        (way._replace(name=f"{way.name}, {rule}", victim=rule), tight)
        for way in (recompute, swap)
        for rule in get_args(victims.Victim.__value__)
    ]
    marks = [round(share * pool) for share in config.watermark_shares]
    sizes = {pages_of(config, share, requests) for share in config.pool_shares}
    pools = [
        (way._replace(pool_pages=num, swap_pages=min(way.swap_pages, num)), wide)
        for num in sorted(sizes | {pool}, reverse=True)
        for way in (recompute, swap)
    ]
    spaces = [round(share * pool) for share in config.swap_shares]
    small = swap._replace(swap_pages=narrow.max_swap_pages)
    hosts = [round(share * pool) for share in config.host_shares]
    return Result(
        ways=server.serve("recompute and swap", ways, repeats=config.repeats),
        victims=server.serve("who gives way", chosen),
        watermarks=server.serve(
            "watermarks",
            [(recompute._replace(watermark=mark), tight) for mark in marks],
        ),
        pools=server.serve("smaller pools", pools),
        spaces=server.serve(
            "swap space", [(swap._replace(swap_pages=num), tight) for num in spaces]
        ),
        hosts=server.serve(
            "host memory", [(small._replace(host_pages=num), narrow) for num in hosts]
        ),
        moves=moving.measure(
            model,
            moved,
            config.page_sizes,
            repeats=config.move_repeats,
            numerics=config.numerics,
            progress=progress,
        ),
        simulated=simulated.empty(),
    )


def plot(axes: Any, result: Result) -> None:
    """Draws what is computed again, what saves it, and what one return costs."""
    if result.simulated.study.size:
        return simulated_report.draw(axes, result.simulated)
    drawing.draw(axes, result)


def claims(result: Result) -> list[Claim]:
    """Holds what must be so, and published numbers, against ours."""
    if result.simulated.study.size:
        return simulated_report.claims(result.simulated)
    return published.claims(result)


def metrics(result: Result) -> dict[str, Any]:
    """Lists every serving, a row each."""
    if result.simulated.study.size:
        return simulated_report.metrics(result.simulated)
    return numbers.metrics(result)


def summary(result: Result) -> list[Part]:
    """Puts the ways beside each other."""
    if result.simulated.study.size:
        return simulated_report.summary(result.simulated)
    return numbers.summary(result)


def bounds(config: Config) -> state.EngineConfig:
    """The engine, whatever its memory."""
    num = config.num_requests
    return state.EngineConfig(
        page_size=config.page_size,
        max_slots=config.max_slots,
        max_length=config.max_length,
        max_sequences=num,
        queue_capacity=num,
        submit_width=num,
        token_budget=config.token_budget,
        steps_per_call=config.steps_per_call,
        numerics=config.numerics,
        seed=config.seed,
    )


def workload(
    config: Config, model: checkpoints.Loaded
) -> tuple[list[Request], Request]:
    """Cuts the prompts: those that are served, and the one that is brought back."""
    rng = np.random.default_rng(config.seed)
    num = config.num_requests
    sizes = prompts.ragged(rng, config.prompt_tokens, config.sigma, num)
    limits = prompts.ragged(rng, config.output_tokens, config.sigma, num)
    samplings = [
        Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed + i,
            max_tokens=limit,
            ignore_eos=True,
        )
        for i, limit in enumerate(limits)
    ]
    requests = prompts.held_out(model.tokenizer, sizes, samplings, rng)
    # A file may be shorter.
    tries = [config.move_tokens] * 8
    found = prompts.held_out(model.tokenizer, tries, samplings[:1] * 8, rng)
    return requests, max(found, key=lambda request: len(request.tokens))


def pages_needed(config: Config, requests: list[Request]) -> int:
    """Pages with which nobody ever gives way."""
    pages = sorted(_pages(config, request) for request in requests)
    return sum(pages[-config.max_slots :])


def pages_of(config: Config, share: float, requests: list[Request]) -> int:
    """A share of these, but never fewer than the longest request needs."""
    longest = max(_pages(config, request) for request in requests)
    return max(longest, round(share * pages_needed(config, requests)))


def _pages(config: Config, request: Request) -> int:
    tokens = len(request.tokens) + (request.sampling.max_tokens or 0)
    return -(-tokens // config.page_size)
