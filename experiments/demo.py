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
import time
from typing import Any, NamedTuple

import numpy as np

from experiments import bundled, claims, style, timelines
from experiments.claims import Claim
from experiments.progress import QUIET, Progress
from jaxkv import baselines, checkpoints, models, scheduling, serving, states
from jaxkv.answers import Completion
from jaxkv.sampling import Sampling
from scaling import corpora

PANELS = (3, 1)
PANEL_SIZE_INCHES = (7.2, 1.6)

NUM_SHOWN = 3
"""Answers that stream over the terminal at a time."""
NUM_REPORTED = 6
"""Answers in the report."""


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


class Served(NamedTuple):
    """What one policy did. Steps that fed nothing are left out."""

    request_id: np.ndarray
    """Of the request in each slot, -1 for none: [steps, slots]."""
    held: np.ndarray
    """Slots kept for a finished request: [steps, slots]."""
    num_rows: np.ndarray
    """Tokens fed: [steps, slots]."""
    used_pages: np.ndarray
    """Pages reserved: [steps]."""
    used_places: np.ndarray
    """Token places that hold K and V: [steps]."""
    latency_s: np.ndarray
    """From a request's arrival until the host held its last token: [requests]; not a
    number where it was not served to its end."""
    num_tokens: np.ndarray
    """Tokens of its answer: [requests]."""
    text: np.ndarray
    """Its answer: [requests]."""
    reason: np.ndarray
    """Why it ended; empty if it did not: [requests]."""
    duration_s: float
    """From the first arrival until the host held the last token."""
    compile_s: float
    """Before that: compiling, and a request to warm up."""


class Result(NamedTuple):
    """The same requests, served twice."""

    prompt: np.ndarray
    """Text of every prompt: [requests]."""
    page_size: int
    static: Served
    continuous: Served


class Request(NamedTuple):
    """A prompt, and how its answer is drawn."""

    text: str
    tokens: list[int]
    sampling: Sampling


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
    requests = requests_of(config, model.tokenizer)
    policies = {
        "static batching": baselines.static(),
        "continuous batching": scheduling.fcfs(),
    }
    served = [
        _serve(config, model, policy, requests, name, progress)
        for name, policy in policies.items()
    ]
    prompts = np.array([request.text for request in requests])
    return Result(prompts, config.page_size, *served)


def requests_of(config: Config, tokenizer: Any) -> list[Request]:
    """Cuts the prompts, at the beginning of a line, and draws the lengths."""
    rng = np.random.default_rng(config.seed)
    num = config.num_requests
    documents = corpora.load(corpora.STANDARD_LIBRARY).held_out
    sizes = _ragged(rng, config.prompt_tokens, config.sigma, num)
    limits = _ragged(rng, config.output_tokens, config.sigma, num)
    requests = []
    for i, (size, limit) in enumerate(zip(sizes, limits, strict=True)):
        text = documents[rng.integers(len(documents))].text.decode()
        starts = [0, *(place + 1 for place, x in enumerate(text) if x == "\n")]
        # No token is longer than a prompt's worth of text, and a byte is one at most.
        starts = [place for place in starts if place + size < len(text)] or [0]
        start = starts[rng.integers(len(starts))]
        tokens = tokenizer.encode(text[start : start + 8 * size])[:size]
        ask = Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed + i,
            max_tokens=limit,
        )
        requests.append(Request(tokenizer.decode(tokens), tokens, ask))
    return requests


def _ragged(
    rng: np.random.Generator, bounds: tuple[int, int], sigma: float, num: int
) -> list[int]:
    """Draws lengths from a log-normal law around the geometric middle of its bounds."""
    low, high = bounds
    drawn = rng.lognormal(0.5 * np.log(low * high), sigma, num)
    return np.clip(drawn.round(), low, high).astype(int).tolist()


def _serve(
    config: Config,
    model: checkpoints.Loaded,
    policy: scheduling.Policy,
    requests: list[Request],
    name: str,
    progress: Progress,
) -> Served:
    """Serves the requests under one policy, live."""
    pages_per_slot = -(-config.max_length // config.page_size)
    bounds = states.EngineConfig(
        num_pages=config.max_slots * pages_per_slot,
        page_size=config.page_size,
        max_slots=config.max_slots,
        max_length=config.max_length,
        max_sequences=config.num_requests,
        queue_capacity=config.num_requests,
        submit_width=config.num_requests,
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
    progress.show(f"{name}: compiling")
    start_s = time.perf_counter()
    if not progress.stopped:
        engine.generate([requests[0].tokens], requests[0].sampling)
    compile_s = time.perf_counter() - start_s
    engine.trace.clear()
    update = progress.bar(name, len(requests), "requests")
    start_s = engine.now()
    answers = ["" for _ in requests]
    done: dict[int, Completion] = {}
    if not progress.stopped:
        for i, request in enumerate(requests):
            engine.submit(request.tokens, request.sampling, request_id=i)
    shown_s = 0.0
    for event in engine.stream():
        answers[event.request_id] += event.text
        if event.completion is not None:
            done[event.request_id] = event.completion
            update(len(done))
        if engine.now() - shown_s > 0.1:
            shown_s = engine.now()
            progress.show(_live(requests, answers, done))
        if progress.stopped:
            break
    return _served(engine, config, done, answers, start_s, compile_s)
