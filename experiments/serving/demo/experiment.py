"""How much faster does continuous batching serve the same requests?

A real model continues real text: prompts of ragged lengths, cut from files that it was
not trained on, with answers of ragged lengths. The same requests, sampled alike, are
served twice by the same engine in the same bounds. Under static batching a batch of
requests keeps its slots and its longest-case reservations until its last one ends;
under continuous batching a slot goes to the next request at once, and pages are taken
as sequences grow. Programs are compiled before the clock starts.

KV utilisation is the mean, over steps that fed tokens, of the share of reserved token
places that hold one: used places / (used pages * page size).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Claim, Excerpts, Part, Sheet, judge, units
from experiments.harness import Request, bundled, servings, showing, streaming
from experiments.harness.prompts import held_out, ragged
from experiments.harness.servings import Served
from experiments.plotting import style, timelines
from jaxkv import validation
from jaxkv.engine import state
from jaxkv.models import checkpoints, paged
from jaxkv.progress import QUIET, Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs, static_batching
from jaxkv.serving.engine import Engine

PANELS = (3, 1)
PANEL_SIZE_INCHES = (7.2, 1.6)

STATIC, CONTINUOUS = "static batching", "continuous batching"

NUM_REPORTED, NUM_CHARS = 6, 240
"""Answers in the report, and characters of each."""
NUM_LINES = 6
"""Lines of each, and of its prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The requests, and the engine that serves them."""

    model: str = "stdlib-bytes"
    """A folder, or a bundled model."""
    num_requests: int = 48
    """Requests, all there when the clock starts."""
    prompt_tokens: tuple[int, int] = (16, 192)
    """Shortest and longest prompt."""
    output_tokens: tuple[int, int] = (16, 256)
    """Shortest and longest limit of an answer; the model may end it earlier."""
    sigma: float = 0.9
    """Raggedness: standard deviation of the logarithm of both lengths."""
    temperature: float = 0.7
    """Of the draws."""
    top_p: float = 0.95
    """Of the draws."""
    max_slots: int = 8
    """Sequences that run at once."""
    max_length: int = 512
    """Token places that static batching reserves for each slot."""
    page_size: int = 16
    """Token places in a page."""
    token_budget: int = 64
    """Rows that a step feeds at most."""
    steps_per_call: int = 16
    """Steps between two looks of the host."""
    seed: int = 0
    """Of the prompts, the limits and the draws."""

    def __post_init__(self) -> None:
        """Refuses lengths that do not fit."""
        validation.at_least(
            self, "num_requests", "max_slots", "page_size", "steps_per_call"
        )
        validation.at_least(self, "sigma", "seed", low=0)
        validation.ascending(
            self, "prompt_tokens", "output_tokens", low=1, strictly=False
        )
        longest = self.prompt_tokens[1] + self.output_tokens[1]
        if longest > self.max_length:
            raise ValueError(
                f"{self.prompt_tokens=} and {self.output_tokens=} may need {longest} "
                f"tokens, more than {self.max_length=}"
            )


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        num_requests=6,
        prompt_tokens=(4, 24),
        output_tokens=(2, 24),
        max_slots=2,
        max_length=48,
        token_budget=16,
        steps_per_call=8,
    ),
}


class Result(NamedTuple):
    """The same requests, served twice."""

    prompt: np.ndarray
    """Text of every prompt: [requests]."""
    static: Served
    continuous: Served


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Serves the requests under both policies; ended early, it has what is done."""
    model = checkpoints.load_model(bundled.folder_of(config.model))
    if model.tokenizer is None:
        raise ValueError(f"{config.model}: has no tokenizer, so no text")
    if config.max_length > model.config.max_positions:
        raise ValueError(
            f"{config.max_length=} must be at most {model.config.max_positions=}"
        )
    progress.show("cutting prompts from files that the model has not seen")
    requests = _requests(config, model)
    static = _serve(config, model, STATIC, static_batching.static(), requests, progress)
    continuous = _serve(config, model, CONTINUOUS, fcfs.fcfs(), requests, progress)
    prompts = np.array([request.text for request in requests])
    return Result(prompts, static, continuous)


def plot(axes: Any, result: Result) -> None:
    """Draws both batches on one axis of steps, and the memory that they hold."""
    bars, memory = axes[:2], axes[2]
    colors = style.colors()
    both = {
        STATIC: (result.static, colors[6], "#fae0cf"),
        CONTINUOUS: (result.continuous, colors[5], "#cfe3f1"),
    }
    num_steps = max(1, *(len(served.num_rows) for served, _, _ in both.values()))
    for ax, (name, (served, color, pale)) in zip(bars, both.items(), strict=True):
        timelines.draw_slots(
            *(ax, served.request_id, served.held, served.num_rows),
            num_steps=num_steps,
        )
        steps, rate = len(served.num_rows), servings.numbers(served)["tokens_per_s"]
        title = f"{name}: {steps:,} steps, {rate or 0:,.0f} tokens/s"
        ax.set_title(title, loc="left", color=color)
        ax.tick_params(labelbottom=False)
        edges = np.arange(steps + 1)
        reserved = served.used_pages * served.page_size
        memory.stairs(reserved, edges, fill=True, color=pale)
        look = {"baseline": None, "color": color, "linewidth": 0.9}
        kind, _, _ = name.partition(" ")
        label = f"{kind}: reserved"
        memory.stairs(reserved, edges, linestyle=":", label=label, **look)
        label = f"{kind}: holding a token"
        memory.stairs(served.used_places, edges, zorder=3, label=label, **look)
    note = "dark: reading the prompt   hatched: finished, slot kept"
    bars[0].set_title(note, loc="right", color="0.4", fontsize=6)
    memory.set_xlim(0, num_steps)
    memory.set_ylim(0)
    memory.yaxis.set_major_formatter("{x:,.0f}")
    memory.xaxis.set_major_formatter("{x:,.0f}")
    memory.set_xlabel("step")
    memory.set_ylabel("token places")
    memory.set_title("KV memory", loc="left")
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    memory.legend(ncols=4, fontsize=6, handlelength=1.6, columnspacing=1.2, **place)


def metrics(result: Result) -> dict[str, Any]:
    """Compares the two, and shows some answers."""
    static, continuous = map(servings.numbers, (result.static, result.continuous))
    rates = static["tokens_per_s"], continuous["tokens_per_s"]
    both = result.static.is_done & result.continuous.is_done
    return {
        "static": static,
        "continuous": continuous,
        "speed_up": rates[1] / rates[0] if all(rates) else None,
        "requests": len(result.prompt),
        "same_answers": int(
            (both & (result.static.text == result.continuous.text)).sum()
        ),
        "completions": [
            {"prompt": given, "continuation": wrote} for given, wrote in _shown(result)
        ],
    }


def summary(result: Result) -> list[Part]:
    """Compares the two in words, and shows some answers."""
    found = metrics(result)
    both = found["static"], found["continuous"]
    rows = [
        (label, *(write(x[name] or None) for x in both)) for name, label, write in _ROWS
    ]
    slots, requests = result.static.held.shape[1], found["requests"]
    title = f"{requests} requests through {slots} slots, served twice"
    ends = [int(x.is_done.sum()) for x in (result.static, result.continuous)]
    if min(ends) == requests:
        note = (
            f"{found['speed_up']:.2f} times as many tokens per second; "
            f"{found['same_answers']} of {requests} answers are the same under both."
        )
    else:
        note = f"Stopped early: {ends[0]} and {ends[1]} requests came to their end."
    shown = _shown(result)
    return [
        Sheet(title, ("", "static batching", "continuous batching"), rows, note),
        *([Excerpts("what the model was given, and wrote", shown)] if shown else []),
    ]


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("tokens_per_s", "tokens per second", units.rate),
    ("mean_latency_s", "mean latency", units.seconds),
    ("p95_latency_s", "95th percentile of latency", units.seconds),
    ("steps", "steps", units.cell),
    ("slot_utilisation", "slots that are fed", units.share),
    ("kv_utilisation", "reserved KV places that hold a token", units.share),
    ("duration_s", "time to serve", units.seconds),
    ("compile_s", "time to compile, before that", units.seconds),
)


def claims(result: Result) -> list[Claim]:
    """Holds published numbers against ours, where both policies came to an end."""
    if not (result.static.is_done & result.continuous.is_done).all():
        return []
    static, continuous = map(servings.numbers, (result.static, result.continuous))
    return [
        judge(
            "continuous batching serves more tokens a second than static batching",
            source="Yu et al. 2022 (Orca), section 6.2: 36.9x FasterTransformer at "
            "equal latency, GPT-3 175B",
            published=36.9,
            ours=continuous["tokens_per_s"] / static["tokens_per_s"],
            unit="1",
            differs="Theirs is under load, on GPUs, against another program. Here both "
            "share everything but the policy, and the gain is set by how ragged the "
            "lengths are.",
        ),
        judge(
            "reserving the longest case leaves most KV memory without tokens",
            source="Kwon et al. 2023, arXiv:2309.06180, figure 2, Orca (Max)",
            published=0.204,
            ours=static["kv_utilisation"],
            unit="1",
            differs="Theirs are ShareGPT's lengths in reservations of 2,048 tokens.",
        ),
        judge(
            "pages taken as sequences grow are nearly full of tokens",
            source="Kwon et al. 2023, arXiv:2309.06180, figure 2, vLLM",
            published=0.963,
            ours=continuous["kv_utilisation"],
            unit="1",
            differs="Theirs are longer sequences; half a page of each is lost.",
        ),
    ]


def _shown(result: Result) -> list[tuple[str, str]]:
    """The ends of some prompts and the beginnings of their answers."""
    pairs = []
    for i in np.flatnonzero(result.continuous.is_done):
        given = showing.visible(result.prompt[i][-NUM_CHARS:]).split("\n")
        wrote = showing.visible(result.continuous.text[i][:NUM_CHARS]).split("\n")
        pairs.append((given[-NUM_LINES:], wrote[:NUM_LINES]))
    # Those of several lines first: a line alone says little.
    pairs.sort(key=lambda pair: min(map(len, pair)) < NUM_LINES // 2)
    return [("\n".join(a), "\n".join(b)) for a, b in pairs[:NUM_REPORTED]]


def _requests(config: Config, model: checkpoints.Loaded) -> list[Request]:
    rng = np.random.default_rng(config.seed)
    draw = functools.partial(ragged, rng)
    sizes = draw(config.prompt_tokens, config.sigma, config.num_requests)
    limits = draw(config.output_tokens, config.sigma, config.num_requests)
    samplings = [
        Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed + i,
            max_tokens=limit,
        )
        for i, limit in enumerate(limits)
    ]
    return held_out(model.tokenizer, sizes, samplings, rng)


def _serve(
    config: Config,
    model: checkpoints.Loaded,
    name: str,
    policy: Any,
    requests: list[Request],
    progress: Progress,
) -> Served:
    """Serves the requests under one policy, before the person's eyes."""
    pages_per_slot = -(-config.max_length // config.page_size)
    num = len(requests)
    bounds = state.EngineConfig(
        num_pages=config.max_slots * pages_per_slot,
        page_size=config.page_size,
        max_slots=config.max_slots,
        max_length=config.max_length,
        max_sequences=num,
        queue_capacity=num,
        submit_width=num,
        token_budget=config.token_budget,
        steps_per_call=config.steps_per_call,
    )
    engine = Engine(
        model.params,
        paged.PagedForward(model.config, bounds.numerics),
        paged.make_pages(model.config, bounds),
        bounds,
        tokenizer=model.tokenizer,
        eos_ids=model.eos_ids,
        vocab_size=model.config.vocab_size,
        policy=policy,
        keep_trace=True,
    )
    update = progress.bar(name, num, "requests")
    compile_s, done = 0.0, {}
    if not progress.stopped:
        progress.show(f"{name}: compiling")
        engine.generate([requests[0].tokens], requests[0].sampling)
        compile_s = engine.now()
        engine.trace.clear()
        done = streaming.stream(engine, requests, progress, update)
    return servings.gather(
        engine.trace,
        done,
        num_requests=num,
        num_slots=config.max_slots,
        page_size=config.page_size,
        compile_s=compile_s,
    )
