"""How much K and V memory do sequences with a common beginning share?

A real model continues real text, and the page tables are looked at in the middle of
every step. Answers of one request share the pages of its prompt; beams also share what
they wrote before they parted; and requests that begin alike share the pages of that
beginning, if a prefix cache finds it.

Saved pages are 1 - pages in use / pages that every sequence would hold for itself, both
summed over steps. Lengths are drawn after the printed means of Alpaca (short) and
ShareGPT (long), a byte being a token; the model's own end token is ignored.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.framework import Claim, Part
from experiments.harness import Law, Lengths, bundled, length_distributions, prompts
from experiments.serving.sharing import counted as sharing_counted
from experiments.serving.sharing import (
    drawing,
    groups,
    numbers,
    published,
    simulated_drawing,
)
from experiments.serving.sharing import translated as sharing_translated
from experiments.serving.sharing.counted import Counted
from experiments.serving.sharing.groups import Readings, Savings
from experiments.serving.sharing.picture import NUM_SEQUENCES, Picture, take
from experiments.serving.sharing.prefixes import Prefixes, serve_prefixes
from experiments.serving.sharing.serving import Server
from experiments.serving.sharing.translated import Translated
from jaxkv import validation
from jaxkv.engine import state
from jaxkv.models import checkpoints
from jaxkv.progress import QUIET, Progress
from jaxkv.sampling import Sampling

PANEL_SIZE_INCHES = drawing.SIZE_INCHES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The requests, and the engine that serves them."""

    model: str = "stdlib-bytes"
    """A folder, or a bundled model; empty to serve nothing by a model."""
    num_simulated: int = 0
    """Requests of the paper's lengths of which the pages are counted by simulation, in
    each of its settings; 0 for none."""
    answers: tuple[int, ...] = (2, 4, 6, 8)
    """Answers of a request."""
    widths: tuple[int, ...] = (2, 4, 6)
    """Beams of a request."""
    num_short: int = 48
    """Requests with lengths after Alpaca's."""
    num_long: int = 16
    """Requests with lengths after ShareGPT's."""
    length_scale: float = 1.0
    """By which their mean lengths are multiplied."""
    prefixes: tuple[int, ...] = (80, 341)
    """Tokens with which requests begin alike: one and five examples."""
    num_prefixed: int = 48
    """Requests that begin alike."""
    own_tokens: tuple[int, int] = (16, 64)
    """Shortest and longest rest of their prompts, and the same of their answers."""
    repeats: int = 5
    """Servings with the prefix cache, and as many without."""
    chunk_sizes: tuple[int, ...] = (1, 7, 64)
    """Prompt tokens that a step may feed of one request, where these are counted."""
    temperature: float = 0.7
    """Of the draws."""
    top_p: float = 0.95
    """Of the draws."""
    max_slots: int = 8
    """Sequences that run at once."""
    max_length: int = 1024
    """Longest sequence."""
    page_size: int = 16
    """Token places in a page."""
    numerics: Literal["fast", "reproducible"] = "fast"
    """Whether answers may depend, in rounding, on the company."""
    seed: int = 0
    """Of lengths, prompts and draws."""

    def __post_init__(self) -> None:
        """Refuses what leaves nothing to share, or does not fit."""
        validation.at_least(self, "num_simulated", low=0)
        if not (self.model or self.num_simulated):
            raise ValueError("model and num_simulated leave nothing to share")
        counts = ("num_short", "num_long", "num_prefixed", "repeats", "page_size")
        validation.at_least(self, *counts)
        if self.max_slots < NUM_SEQUENCES:
            raise ValueError(f"{self.max_slots=} must be at least 4")
        for name in ("answers", "widths"):
            sizes = getattr(self, name)
            if not sizes or not all(2 <= size <= self.max_slots for size in sizes):
                raise ValueError(f"{name}={sizes} must lie in [2, {self.max_slots=}]")
        validation.at_least(self, "prefixes", "chunk_sizes")
        low, high = self.own_tokens
        if not 1 <= low <= high:
            raise ValueError(f"{self.own_tokens=} must be in order, from 1")
        validation.within(self, "length_scale", low=0, high=1, ends="(]")
        validation.at_least(self, "seed", low=0)
        longest = max((0, *self.prefixes)) + 2 * high
        if longest > self.max_length:
            raise ValueError(
                f"{self.prefixes=} and {self.own_tokens=} may need {longest} tokens, "
                f"more than {self.max_length=}"
            )


CONFIGS = {
    "real": Config(),
    "paper": Config(model="", num_simulated=512),
    "smoke": Config(
        answers=(4, 8),
        widths=(4,),
        num_short=4,
        num_long=2,
        length_scale=0.2,
        prefixes=(33,),
        num_prefixed=10,
        own_tokens=(2, 8),
        repeats=1,
        chunk_sizes=(3, 64),
        max_length=208,
        numerics="reproducible",
    ),
}


class Result(NamedTuple):
    """What was shared."""

    samples: Savings
    beams: Savings
    readings: Readings
    prefixes: Prefixes
    picture: Picture
    counted: Counted
    translated: Translated


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Serves by a model, and simulates; ended early, it has what is done."""
    counted, translated = sharing_counted.empty(), sharing_translated.empty()
    if config.num_simulated:
        num, seed = config.num_simulated, config.seed
        counted = sharing_counted.count(num, seed, progress)
        if not progress.stopped:
            translated = sharing_translated.translate(
                config.prefixes, sharing_translated.SECONDS, seed, progress
            )
    served = _serve(config, progress) if config.model else _nothing()
    return Result(**served, counted=counted, translated=translated)


def _serve(config: Config, progress: Progress) -> dict[str, Any]:
    """Serves all of it by the model, with one program."""
    model = checkpoints.load_model(bundled.folder_of(config.model))
    server = Server(model, bounds(config))
    rng = np.random.default_rng(config.seed)
    laws = {
        "short": (length_distributions.ALPACA, config.num_short),
        "long": (length_distributions.SHAREGPT, config.num_long),
    }
    kinds = {
        name: length_distributions.draw(
            _scaled(law, config), num, config.max_length, rng
        )
        for name, (law, num) in laws.items()
    }
    sizes = [
        np.array(prompts.ragged(rng, config.own_tokens, 0.5, config.num_prefixed))
        for _ in range(2)
    ]
    ask = Sampling(temperature=config.temperature, top_p=config.top_p)
    common: dict[str, Any] = {"seed": config.seed, "progress": progress}
    progress.show("compiling")
    return dict(
        picture=take(server, ask, **common),
        samples=groups.serve_groups(
            server, kinds, config.answers, ask, beams=False, **common
        ),
        beams=groups.serve_groups(
            server, kinds, config.widths, ask, beams=True, **common
        ),
        readings=groups.read_in_chunks(
            server,
            Lengths(*(tokens[: config.max_slots] for tokens in kinds["long"])),
            max(config.answers),
            config.chunk_sizes,
            **common,
        ),
        prefixes=serve_prefixes(
            server,
            config.prefixes,
            Lengths(*sizes),
            ask,
            repeats=config.repeats,
            **common,
        ),
    )


def _nothing() -> dict[str, Any]:
    """What a model that serves nothing shares."""
    kinds: dict[str, Any] = {
        "samples": Savings,
        "beams": Savings,
        "readings": Readings,
        "prefixes": Prefixes,
        "picture": Picture,
    }
    return {x: kind(*([np.array([])] * len(kind._fields))) for x, kind in kinds.items()}


def plot(ax: Any, result: Result) -> None:
    """Draws savings against the number of sequences, and the page tables."""
    if result.samples.lengths.size or not result.counted.lengths.size:
        drawing.draw(ax, **_served(result))
    else:
        simulated_drawing.draw(ax, result.counted, result.translated)


def claims(result: Result) -> list[Claim]:
    """Holds closed forms and published numbers against ours."""
    return [
        *published.claims(**_served(result)),
        *sharing_counted.claims(result.counted),
        *sharing_translated.claims(result.translated),
    ]


def metrics(result: Result) -> dict[str, Any]:
    """Lists every setting, a row each."""
    tables = {
        "simulated": sharing_counted.table(result.counted),
        "translations": sharing_translated.table(result.translated),
    }
    return numbers.metrics(**_served(result)) | tables


def summary(result: Result) -> list[Part]:
    """Puts ours beside the paper's."""
    return [
        *numbers.summary(**_served(result)),
        *sharing_counted.summary(result.counted),
        *sharing_translated.summary(result.translated),
    ]


def _served(result: Result) -> dict[str, Any]:
    """The parts that a model had a share in."""
    names = ("samples", "beams", "readings", "prefixes", "picture")
    return {name: getattr(result, name) for name in names}


def _scaled(law: Law, config: Config) -> Law:
    scale = config.length_scale
    return law._replace(
        prompt_mean=law.prompt_mean * scale, answer_mean=law.answer_mean * scale
    )


def bounds(config: Config) -> state.EngineConfig:
    """An engine that never runs short of pages, whatever it is given here."""
    pages_per_slot = -(-config.max_length // config.page_size)
    return state.EngineConfig(
        num_pages=2 * config.max_slots * pages_per_slot,
        page_size=config.page_size,
        max_slots=config.max_slots,
        max_length=config.max_length,
        max_sequences=4 * config.max_slots,
        queue_capacity=4 * config.max_slots,
        submit_width=4 * config.max_slots,
        token_budget=max(64, config.max_slots),
        max_beams=max(*config.widths, NUM_SEQUENCES),
        prefix_cache=True,
        numerics=config.numerics,
        seed=config.seed,
    )
