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

from experiments import bundled, prompting, servings, showing, style, timelines
from experiments.claims import Claim, judge
from experiments.progress import QUIET, Progress
from experiments.prompting import Request
from experiments.servings import Served
from jaxkv import baselines, checkpoints, models, scheduling, serving, states
from jaxkv.answers import Completion
from jaxkv.sampling import Sampling

PANELS = (3, 1)
PANEL_SIZE_INCHES = (7.2, 1.6)

STATIC, CONTINUOUS = "static batching", "continuous batching"

NUM_SHOWN = 3
"""Answers that stream over the terminal at a time."""
NUM_REPORTED, NUM_CHARS = 6, 160
"""Answers in the report, and characters of each."""


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
        if self.num_requests < 1:
            raise ValueError(f"{self.num_requests=} must be at least 1")
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name}={low, high} must be in order, from 1")
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
    static = _serve(config, model, STATIC, baselines.static(), requests, progress)
    continuous = _serve(
        config, model, CONTINUOUS, scheduling.fcfs(), requests, progress
    )
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
        memory.stairs(reserved, edges, linestyle=":", **look)
        memory.stairs(served.used_places, edges, zorder=3, **look)
    note = "dark: reading the prompt   hatched: finished, slot kept"
    bars[0].set_title(note, loc="right", color="0.4", fontsize=6)
    memory.set_xlim(0, num_steps)
    memory.set_ylim(0)
    memory.set_xlabel("step")
    memory.set_ylabel("places")
    title = "KV memory, token places: reserved (dotted), holding a token (solid)"
    memory.set_title(title, loc="left")


def metrics(result: Result) -> dict[str, Any]:
    """Compares the two, and shows some answers."""
    static, continuous = map(servings.numbers, (result.static, result.continuous))
    rates = static["tokens_per_s"], continuous["tokens_per_s"]
    both = result.static.is_done & result.continuous.is_done
    shown = np.flatnonzero(result.continuous.is_done)[:NUM_REPORTED]
    return {
        "static": static,
        "continuous": continuous,
        "speed_up": rates[1] / rates[0] if all(rates) else None,
        "requests": len(result.prompt),
        "same_answers": int(
            (both & (result.static.text == result.continuous.text)).sum()
        ),
        "completions": [
            {
                "prompt": "…" + _marked(result.prompt[i][-NUM_CHARS:]),
                "continuation": _marked(result.continuous.text[i][:NUM_CHARS]),
            }
            for i in shown
        ],
    }


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


def _marked(text: str) -> str:
    """Marks the ends of lines, which a Markdown table loses."""
    return showing.visible(text).replace("\n", "⏎\n")


def _requests(config: Config, model: checkpoints.Loaded) -> list[Request]:
    rng = np.random.default_rng(config.seed)
    draw = functools.partial(prompting.ragged, rng)
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
    return prompting.held_out(model.tokenizer, sizes, samplings, rng)


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
    bounds = states.EngineConfig(
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
    engine = serving.Engine(
        model.params,
        models.Forward(model.config, bounds.numerics),
        models.make_pages(model.config, bounds),
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
        done = _stream(engine, requests, progress, update)
    return servings.gather(
        engine.trace,
        done,
        num_requests=num,
        num_slots=config.max_slots,
        page_size=config.page_size,
        compile_s=compile_s,
    )


def _stream(
    engine: serving.Engine,
    requests: list[Request],
    progress: Progress,
    update: Callable[[float], None],
) -> dict[int, Completion]:
    """Runs the engine to its end, or until it is stopped; returns what is complete."""
    texts = [showing.visible(request.text) for request in requests]
    running: dict[int, None] = {}
    done: dict[int, Completion] = {}
    for i, request in enumerate(requests):
        engine.submit(request.tokens, request.sampling, request_id=i)
    shown_s = engine.now()
    for event in engine.stream():
        name = event.request_id
        running[name] = None
        texts[name] += event.text
        if event.completion is not None:
            done[name] = event.completion
            del running[name]
            update(len(done))
        if engine.now() - shown_s > 0.1:
            shown_s = engine.now()
            progress.show(_screen(texts, list(running)))
        if progress.stopped:
            break
    return done


def _screen(texts: list[str], running: list[int]) -> str:
    """The ends of the texts that grow: those of the oldest requests."""
    blocks = []
    for name in running[:NUM_SHOWN]:
        end = showing.last_lines(texts[name], num_lines=5, width=76)
        blocks.append(f"── request {name + 1} ──\n{end}")
    return "\n".join(blocks)
