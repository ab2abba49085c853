"""What does speculative decoding buy, and when does it not pay?

The bundled model continues held-out code. Who guesses: the text itself (n-gram), the
model at places beyond (Jacobi), its own first layers (early exit). All drafts are
judged by `Coupled`, which keeps every token, and tokens are compared one by one with
those of plain decoding.

Speed is decoded tokens a second against plain decoding of the same batch in the same
round: tokens a step, over what a step costs. The ways take turns, and the median of the
rounds counts. Programs are compiled before. Where drafts are accepted by tossed coins
(`Synthetic`) the formula must hold; on text it need not, because a draft that is
accepted makes the next one likelier.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from experiments.decoding.speculation import drawing, held_out, serving, theory
from experiments.decoding.speculation.theory import IndependentDrafts
from experiments.framework import Ours, Part, Record, Sheet, beside, ours
from experiments.framework.table import Floats, Ints, Table, Texts, column, shown
from experiments.harness import model_shapes
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.speculation import Speculation, Synthetic

BOOK = beside(__file__)
FEW_TOKENS, FEW_STEPS = 128, 1000
"""Below, nothing is said of speeds, or of chances."""
LOOKUP, JACOBI = "n-gram", "Jacobi"
EXITS = ("early exit, 1 layer", "early exit, 2 layers")
TEMPERATURES = (0.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(held_out.TextConfig):
    """The text, the ways to guess, and how many tokens."""

    ways: tuple[str, ...] = (LOOKUP, JACOBI, *EXITS)
    """Who guesses."""
    num_drafts: int = 3
    """Tokens guessed in a step where ways and batches are compared."""
    lengths: tuple[int, ...] = (1, 2, 3, 7, 15)
    """Tokens guessed in a step where that is what differs."""
    lengthened: tuple[str, ...] = (LOOKUP, "early exit, 1 layer")
    """Ways of which that is asked."""
    batches: tuple[int, ...] = (2, 4, 8, 16)
    """Sequences decoded together, by n-grams; one alone is measured in any case."""
    acceptances: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 0.9)
    """Chances of a draft that is judged by a coin."""
    coin_drafts: tuple[int, ...] = (1, 2, 4, 8)
    """Drafts that are."""
    num_coins: int = 16
    """Sequences that toss coins at once, a share of them for each number of drafts."""
    coin_tokens: int = 768
    """Of each."""
    coin_batches: int = 6
    """Batches of as many."""

    def __post_init__(self) -> None:
        """Refuses what leaves nothing to measure."""
        super().__post_init__()
        validation.at_least(self, "num_drafts", "coin_tokens", "coin_batches")
        validation.ascending(self, "lengths", "coin_drafts", low=1)
        validation.ascending(self, "batches", low=2)
        validation.within(self, "acceptances", low=0, high=1)
        validation.among(self, "ways", "lengthened", known=(LOOKUP, JACOBI, *EXITS))
        self.check_answer_length(max(self.num_drafts, *self.lengths))
        if self.num_coins < len(self.coin_drafts):
            raise ValueError(
                f"num_coins={self.num_coins!r} must be at least "
                f"coin_drafts={self.coin_drafts!r}"
            )

    def cases(self, setting: held_out.Setting) -> list[tuple[str, int]]:
        """Ways beside plain decoding, and their drafts."""
        batch, temperature = setting
        if batch > 1:
            return [(LOOKUP, self.num_drafts)]
        found = [(way, self.num_drafts) for way in self.ways]
        if temperature == 0:
            found += [(way, num) for way in self.lengthened for num in self.lengths]
        return [*dict.fromkeys(found)]


PANELS, PANEL_SIZE_INCHES = (2, 2), (3.4, 3.2)

CONFIGS = {
    "real": Config(),
    "smoke": Config(
        num_prompts=2,
        prompt_tokens=16,
        output_tokens=40,
        ways=(LOOKUP, "early exit, 1 layer"),
        num_drafts=2,
        lengths=(2, 4),
        lengthened=(LOOKUP,),
        batches=(2,),
        acceptances=(0.6,),
        coin_drafts=(1, 3),
        num_coins=4,
        coin_tokens=40,
        coin_batches=2,
        rounds=2,
        steps_per_call=2,
    ),
}


class DecodingRuns(Table):
    """Ways to decode, a row for each, and plain decoding of the same batch beside."""

    way: Texts = column("of `serving.METHODS`")
    num_drafts: Ints = column("guessed in a step at most", heading="drafts")
    batch: Ints = column("sequences decoded together")
    temperature: Floats = column("0 is greedy")
    steps: Ints = column("of all sequences, each by itself", is_told=False)
    emitted: Ints = column("tokens that they gave", is_told=False)
    drafted: Ints = column("drafts that were fed", is_told=False)
    first: Ints = column("steps whose first draft was accepted", is_told=False)
    step_s: Float[np.ndarray, "rows rounds"] = column(
        "that a step of the batch takes", heading="a step", of=np.median
    )
    plain_s: Float[np.ndarray, "rows rounds"] = column(
        "that a plain one takes", heading="a plain step", of=np.median
    )
    num_tokens: Ints = column("of all answers", heading="tokens")
    num_other: Ints = column(
        "of these, that differ from plain decoding's", heading="other tokens"
    )

    @property
    @shown(heading="drafts a step", form="{:.2f}")
    def drafts_per_step(self) -> np.ndarray:
        """Drafts that were fed, misses of the n-grams counted as none."""
        return self.drafted / self.steps

    @property
    @shown(heading="tokens a step", form="{:.2f}")
    def tokens_per_step(self) -> np.ndarray:
        """Tokens that a sequence gains in a step."""
        return self.emitted / self.steps

    @property
    @shown(heading="accepted")
    def accepted_share(self) -> np.ndarray:
        """Of all drafts that were fed."""
        return (self.emitted - self.steps) / np.maximum(self.drafted, 1)

    @property
    @shown(heading="first accepted")
    def first_share(self) -> np.ndarray:
        """Steps whose first draft was accepted; it was not where there was none."""
        return self.first / self.steps

    @property
    @shown(heading="by formula", form="{:.2f}")
    def expected(self) -> np.ndarray:
        """Tokens a step if each draft were accepted like the first, independently."""
        return theory.expected_tokens(self.first_share, self.num_drafts)

    @property
    @shown(heading="step / plain step", form="{:.2f}")
    def cost(self) -> np.ndarray:
        """What a step costs, in plain ones; the median of rounds."""
        return serving.relative_costs(self.step_s, self.plain_s)

    @property
    @shown(heading="times as fast", form="{:.2f}")
    def speed(self) -> np.ndarray:
        """Tokens a second over those of plain decoding."""
        return self.tokens_per_step / self.cost


class SyntheticDrafts(IndependentDrafts):
    """Drafts accepted by tossing coins."""

    @property
    @shown(heading="off", form="{:+.2%}")
    def off(self) -> np.ndarray:
        """How far, as a share."""
        return self.tokens_per_step / self.expected - 1

    @property
    @shown(heading="standard error", form="{:.2%}")
    def error(self) -> np.ndarray:
        """Of tokens a step, as a share of what they should be, by the formula."""
        return self.chance_error / self.expected


class Result(Record):
    """What was measured."""

    runs: DecodingRuns = column("ways to decode")
    coins: SyntheticDrafts = column("drafts judged by coins")
    output_tokens: int = column("of each answer", is_told=False)
    num_drafts: int = column("where ways are compared", is_told=False)
    device: str = column("kind of it")


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Decodes every way in turns, then tosses coins; ended early, what is done.

    Raises:
      ValueError: the model cannot be served, or has no room for so many tokens.
    """
    longest = max(config.max_length, config.prompt_tokens + config.coin_tokens)
    model = model_shapes.load_with_text(config.model, max_length=longest)
    settings = [(1, x) for x in TEMPERATURES] + [(num, 0.0) for num in config.batches]
    rows = held_out.decode_in_turns(config, model, settings, config.cases, progress)
    runs, coins = DecodingRuns.of(rows), []
    num, drafts = config.num_coins, config.coin_drafts
    longest = config.prompt_tokens + config.coin_tokens
    bounds = serving.drafting_engine_config(
        num, drafts[-1], longest, config.steps_per_call
    )
    total = num * config.coin_batches
    texts, asks = config.cut(model.tokenizer, total, 1.0, config.coin_tokens)
    for chance in progress.track(config.acceptances, "tossing coins", "chances"):
        judged = Speculation(serving.MixedDraftLengths(drafts), Synthetic(chance))
        server = serving.make_server(model, "Jacobi", bounds, judged)
        counts = np.zeros((len(drafts), 2), int)
        for start in range(0, total, num):
            server.serve(texts[start : start + num], asks[start : start + num])
            counts += [serving.steps_with_drafts(server, each) for each in drafts]
        coins += [(chance, *x) for x in zip(drafts, *counts.T.tolist(), strict=True)]
    return Result(
        runs,
        SyntheticDrafts.of(coins),
        config.output_tokens,
        config.num_drafts,
        jax.devices()[0].device_kind,
    )


NOTES = (
    "Times as fast as plain decoding of the same batch: tokens a step over step / "
    "plain step, the median of rounds in turns. First accepted: of all steps; where an "
    "n-gram finds nothing there is no first draft, and the step feeds one row, as "
    "plain ones do.",
    "By formula: if each draft were accepted like the first, independently. Text is "
    "not so: where n-grams are right they go on being right, so that more is accepted "
    "than the formula says; a cut model's guesses are near it.",
    "N-grams. The texts are the same whatever the batch, but for one that is larger "
    "than their number; it is the step that costs more.",
)


def summary(result: Result) -> list[Part]:
    """Tables: ways, drafts, batches, and coins."""
    runs, num = result.runs, result.num_drafts
    alone = runs.where(batch=1)
    lengths, batches = alone.where(temperature=0.0), runs.where(temperature=0.0)
    lengths = lengths.at(np.lexsort((lengths.num_drafts, lengths.way)))
    said = ("drafts_per_step", "accepted_share", "first_share", "tokens_per_step")
    speed, same = ("cost", "speed"), ("num_tokens", "num_other")
    names = ("way", "temperature", *said, *speed, *same)
    drafts = ("way", "num_drafts", *said[2:], "expected", *speed)
    together = ("batch", "tokens_per_step", "step_s", "plain_s", *speed, *same)
    ways, batches = (
        alone.where(num_drafts=num),
        batches.where(way=LOOKUP, num_drafts=num),
    )
    title = f"ways, one sequence on {result.device}"
    sheets: list[Sheet] = [
        ways.sheet(title, *names, note=NOTES[0]),
        lengths.sheet("drafts a step, greedy", *drafts, note=NOTES[1]),
        batches.sheet("sequences at once, greedy", *together, note=NOTES[2]),
        result.coins.sheet("drafts accepted by coins, against the formula"),
    ]
    return [sheet for sheet in sheets if sheet.rows]


@BOOK.judges
def claims(result: Result) -> Iterator[Ours]:
    """Holds tokens, formulas and speeds against what was said of them."""
    runs, coins = result.runs, result.coins
    few = result.output_tokens < FEW_TOKENS
    if len(runs):
        yield ours("lossless", runs.num_other.sum(), num=int(runs.num_tokens.sum()))
    if len(coins):
        steps = int(coins.steps.min())
        words: dict[str, Any] = {"differs": steps < FEW_STEPS, "steps": steps}
        yield ours("law", np.abs(coins.off).max(), **words)
    for id, formula in (
        ("tokens", theory.tokens_per_step),
        ("operations", theory.operations_per_token),
    ):
        for chance, by_drafts in BOOK.published(id).items():
            for num in by_drafts:
                words = {"acceptance": chance, "drafts": num}
                yield ours(id, formula(float(chance), int(num)), **words)
    alone = runs.where(batch=1, temperature=0.0)
    if len(alone):
        best = alone.at([int(np.nanargmax(alone.speed))])
        words = {"way": best.way[0], "drafts": best.num_drafts[0]}
        yield ours("speed", best.speed[0], differs=few, **words)
    alone = alone.where(num_drafts=result.num_drafts)
    lookup, jacobi = (alone.where(way=way) for way in (LOOKUP, JACOBI))
    if len(lookup):
        yield ours("lookup", lookup.tokens_per_step[0], device=result.device)
    if len(jacobi):
        yield ours("jacobi", jacobi.speed[0], device=result.device)
    many = runs.at(runs.batch > 1)
    if len(lookup) and len(many):
        most = many.at([int(np.argmax(many.batch))])
        gain = most.speed[0] / lookup.speed[0]
        yield ours("batch", gain, device=result.device, most=int(most.batch[0]))


def plot(axes: Any, result: Result) -> None:
    """Draws tokens a step, speeds by way and by batch, and the formula."""
    drawing.draw_speculation(axes, result.runs, result.coins, result.num_drafts)
