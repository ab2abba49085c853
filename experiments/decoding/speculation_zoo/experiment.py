"""Which way to speculate, does it always pay, and what do several candidates gain?

Every method continues the same held-out code with the same model, one sequence alone,
greedily and at temperature 1, in the same rounds as plain decoding; drafts are judged
by `Coupled`, and every token is compared with plain decoding's. Tokens a step are a
property of method, model and text. Speeds are this machine's: what a step costs stands
beside them.

Then the length that adapts: batches of 1 to many sequences, again beside plain
decoding, in more rounds. Nobody can promise that drafts pay; not to draft where they do
not can be promised, and what the promise costs is measured.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.decoding.speculation import held_out, on_text, serving
from experiments.decoding.speculation_zoo import drawing
from experiments.framework import Ours, Part, Record, Sheet, beside, column, ours
from experiments.harness import bundled, model_shapes
from experiments.harness.serving import Server
from jaxkv import validation
from jaxkv.engine import EngineConfig
from jaxkv.progress import QUIET, Progress
from jaxkv.speculation import head_folders

BOOK = beside(__file__)
FEW_TOKENS = 128
"""Below, nothing is said of speeds."""
PUBLISHED = {
    "prompt lookup": "n-gram",
    "lookahead": "lookahead",
    "Medusa": "Medusa, tree",
    "EAGLE": "EAGLE, chain",
    "EAGLE-2": "EAGLE, tree",
}
"""Methods as they are published, and which way is nearest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(held_out.TextConfig):
    """The text, the ways, and how many tokens."""

    draft: str = ""
    """Another model, which drafts where a way says so; empty: no way does."""
    ways: tuple[tuple[str, int], ...] = (
        ("n-gram", 3),
        ("n-gram", 15),
        ("Jacobi", 3),
        ("lookahead", 16),
        ("early exit, 1 layer", 3),
        ("Medusa, chain", 3),
        ("Medusa, tree", 7),
        ("Medusa, tree", 15),
        ("EAGLE, chain", 1),
        ("EAGLE, chain", 3),
        ("EAGLE, tree", 7),
        ("EAGLE, tree", 15),
    )
    """Ways, with the drafts of a step: with the token before them 4, 8 or 16 rows, as
    many as CPUs multiply at once."""
    adaptive: tuple[tuple[str, int], ...] = (("n-gram, adaptive", 7),)
    """Ways that adapt, with the most drafts of a step: to 8 rows, to 4 or to one."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Sequences decoded together by these."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """0 is greedy."""
    adaptive_rounds: int = 9
    """Turns of those that adapt."""

    def __post_init__(self) -> None:
        """Refuses what leaves nothing to measure."""
        super().__post_init__()
        validation.at_least(self, "adaptive_rounds")
        validation.ascending(self, "batches", low=1)
        validation.within(self, "temperatures", low=0, high=2)
        adapt = {way for way, its in serving.METHODS.items() if its.adaptive}
        for name, known in (
            ("ways", {*serving.METHODS} - adapt - {serving.PLAIN}),
            ("adaptive", adapt),
        ):
            for way, num in getattr(self, name):
                validation.choice(f"self.{name}", way, sorted(known))
                validation.integer(f"drafts of {way}", num, low=1)
        drafting = any(way == "draft model" for way, _ in self.ways)
        if drafting != bool(self.draft):
            raise ValueError(f"draft={self.draft!r} goes with the way 'draft model'")
        drafts = [num for _, num in (*self.ways, *self.adaptive)]
        self.check_answer_length(max(drafts, default=1))


PANELS, PANEL_SIZE_INCHES = (2, 2), (3.4, 4.6)

CONFIGS = {
    "real": Config(),
    # The target is what `jaxkv run bundled_model deep` trains, in an hour and more.
    "deep": Config(
        model="runs/stdlib-bytes-deep/model",
        draft="stdlib-bytes",
        ways=(
            ("draft model", 1),
            ("draft model", 3),
            ("draft model", 7),
            ("n-gram", 3),
            ("n-gram", 15),
            ("Jacobi", 3),
            ("lookahead", 16),
            ("early exit, 2 layers", 3),
        ),
        batches=(1, 8),
    ),
    "smoke": Config(
        num_prompts=2,
        prompt_tokens=16,
        output_tokens=40,
        ways=(("n-gram", 2), ("lookahead", 8)),
        adaptive=(("n-gram, adaptive", 2),),
        batches=(2,),
        temperatures=(0.0,),
        rounds=2,
        adaptive_rounds=2,
        steps_per_call=2,
    ),
}


class Result(Record):
    """What was measured."""

    ways: on_text.DecodingRuns = column("ways to decode, one sequence alone")
    adaptive: on_text.DecodingRuns = column("lengths that adapt, by batch")
    output_tokens: int = column("of each answer", is_told=False)
    device: str = column("kind of it")


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Decodes every way in turns, then those that adapt; ended early, what is done.

    Raises:
      ValueError: the model cannot be served, has no room for so many tokens, or no
        heads that a way needs.
    """
    model = model_shapes.load_with_text(config.model, max_length=config.max_length)
    draft = None
    if config.draft:
        draft = model_shapes.load_with_text(config.draft, max_length=config.max_length)
    heads = {
        kind: head_folders.load(
            bundled.heads_of(config.model, kind), model.config, dtype="float32"
        )
        for kind in head_folders.KINDS
        if any(
            serving.METHODS[way].method == kind
            for way, _ in (*config.ways, *config.adaptive)
        )
    }

    def serve(way: str, bounds: EngineConfig) -> Server:
        its = heads.get(serving.METHODS[way].method or "")
        return serving.make_server(model, way, bounds, heads=its, draft=draft)

    decode = functools.partial(
        held_out.decode_in_turns, config, model, progress=progress, serve=serve
    )
    alone = [(1, temperature) for temperature in config.temperatures]
    ways = on_text.DecodingRuns.of(decode(alone, lambda _: config.ways))
    batches = [(b, t) for b in config.batches for t in config.temperatures]
    rounds = config.adaptive_rounds
    adapting = decode(batches, lambda _: config.adaptive, rounds=rounds)
    adaptive = on_text.DecodingRuns.of(adapting)
    kind = jax.devices()[0].device_kind
    return Result(ways, adaptive, config.output_tokens, kind)


NOTES = (
    "Which draft, and when? Tokens a step are what method, model and text give; a step "
    "costs as many plain ones as stand beside it, and times as fast is one over the "
    "other. First accepted: of all steps; of a tree, that one of the root's children "
    "was.",
    "Can a gain be promised? Not by a draft. A length that adapts goes down to none: "
    "it drafts where that pays by what was accepted of late and by what steps were "
    "measured to cost, and is near plain decoding where nothing does.",
)


def summary(result: Result) -> list[Part]:
    """Tables: ways, and lengths that adapt."""
    said = ("drafts_per_step", "first_share", "tokens_per_step", "cost", "speed")
    same, title = ("num_tokens", "num_other"), f"one sequence on {result.device}"
    names = ("way", "num_drafts", *said, *same)
    greedy, drawn = (result.ways.where(temperature=x) for x in (0.0, 1.0))
    settings = ("way", "batch", "temperature", said[0], *said[2:], *same)
    sheets: list[Sheet] = [
        greedy.sheet(f"{title}, greedy", *names, note=NOTES[0]),
        drawn.sheet(f"{title}, temperature 1", *names),
        result.adaptive.sheet("lengths that adapt", *settings, note=NOTES[1]),
    ]
    return [sheet for sheet in sheets if sheet.rows]


@BOOK.judges
def claims(result: Result) -> Iterator[Ours]:
    """Holds tokens, acceptance and speeds against what was said of them."""
    ways, adaptive = result.ways, result.adaptive
    few = result.output_tokens < FEW_TOKENS
    other, total = (
        sum(int(getattr(runs, name).sum()) for runs in (ways, adaptive))
        for name in ("num_other", "num_tokens")
    )
    if total:
        yield ours("lossless", other, num=total)
    if len(adaptive):
        speeds = adaptive.speed
        yield ours("mean", np.exp(np.log(speeds).mean()), differs=few)
        worst = adaptive.at([int(np.argmin(speeds))])
        words: dict[str, Any] = {"way": worst.way[0], "batch": int(worst.batch[0])}
        words["temperature"] = worst.temperature[0]
        yield ours("worst", worst.speed[0], differs=few, **words)
    drafters = ("EAGLE", "draft model")
    trained = ways.at(np.array([way.startswith(drafters) for way in ways.way], bool))
    sure = trained.at(trained.first_share >= 0.75) if len(trained) else trained
    if len(sure):
        best = sure.at([int(np.argmax(sure.speed))])
        words = {"way": best.way[0], "drafts": int(best.num_drafts[0])}
        words |= {"temperature": best.temperature[0], "first": best.first_share[0]}
        yield ours("pair", best.speed[0], differs=few, **words)
    greedy = ways.where(temperature=0.0)
    for method, way in PUBLISHED.items():
        here = greedy.where(way=way)
        if len(here):
            most = float(here.tokens_per_step.max())
            yield ours("tokens", most, method=method, device=result.device)
    chain, tree = (greedy.where(way=f"Medusa, {x}") for x in ("chain", "tree"))
    if len(chain) and len(tree):
        gain = tree.tokens_per_step.max() / chain.tokens_per_step.max()
        yield ours("trees", gain, device=result.device)


def plot(axes: Any, result: Result) -> None:
    """Draws tokens and speeds of all ways, costs against drafts, and batches."""
    drawing.draw_methods(axes, result.ways, result.adaptive)
