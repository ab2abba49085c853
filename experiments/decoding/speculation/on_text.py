"""Measures the speed-up of speculative decoding on held-out code.

The bundled model continues held-out code. Drafts come from the text itself (n-gram),
from the model at later positions (Jacobi), or from its first layers (early exit).
`Coupled` verifies all drafts and keeps every token; tokens are compared one by one with
those of plain decoding.

Speed is tokens/s relative to plain decoding of the same batch in the same round: tokens
per step over the relative cost of a step. Methods alternate, and the median over rounds
counts. Programs are compiled before. With synthetic acceptance (`Synthetic`) the
formula must hold. On text it need not, because acceptance of a draft token raises the
chance of the next one.
"""

from collections.abc import Iterator
from typing import Annotated

import jax
import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.decoding.speculation import drawing, held_out, serving, theory
from experiments.decoding.speculation.theory import IndependentDrafts
from experiments.harness import load_text_model
from jaxkv.engine import Speculation
from jaxkv.speculation import Synthetic

CLAIMS = lab.claims_file(__file__)
FEW_TOKENS = 128
FEW_STEPS = 1000
"""Output tokens below which speeds have no verdict, and steps below which counts have
none."""
LOOKUP = "n-gram"
JACOBI = "Jacobi"
EXITS = ("early exit, 1 layer", "early exit, 2 layers")
TEMPERATURES = (0.0, 1.0)


class Config(held_out.TextConfig):
    """Text, methods and lengths."""

    ways: Annotated[tuple[str, ...], lab.Choices((LOOKUP, JACOBI, *EXITS))] = (
        LOOKUP,
        JACOBI,
        *EXITS,
    )
    """Compared drafters."""
    num_drafts: lab.PositiveInt = 3
    """Draft length of the comparison of methods and batch sizes."""
    lengths: lab.AscendingInts = (1, 2, 3, 7, 15)
    """Draft lengths of the sweep."""
    lengthened: Annotated[tuple[str, ...], lab.Choices((LOOKUP, JACOBI, *EXITS))] = (
        LOOKUP,
        "early exit, 1 layer",
    )
    """Drafters of the sweep over draft lengths."""
    batches: Annotated[tuple[int, ...], lab.Ascending(2)] = (2, 4, 8, 16)
    """Batch sizes with n-gram drafts; batch 1 is always measured."""
    acceptances: lab.Shares = (0.2, 0.4, 0.6, 0.8, 0.9)
    """Acceptance rates of synthetic drafts."""
    coin_drafts: lab.AscendingInts = (1, 2, 4, 8)
    """Draft lengths of synthetic drafts."""
    num_coins: int = 16
    """Sequences with synthetic drafts in a batch, divided over the draft lengths."""
    coin_tokens: lab.PositiveInt = 768
    """Tokens of each of these sequences."""
    coin_batches: lab.PositiveInt = 6
    """Batches of these sequences."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self.check_answer_length(max(self.num_drafts, *self.lengths))
        if self.num_coins < len(self.coin_drafts):
            raise ValueError(
                f"num_coins={self.num_coins!r} must be at least "
                f"coin_drafts={self.coin_drafts!r}"
            )

    def cases(self, setting: held_out.Setting) -> list[tuple[str, int]]:
        """Returns methods with draft lengths, without plain decoding."""
        batch, temperature = setting
        if batch > 1:
            return [(LOOKUP, self.num_drafts)]
        pairs = [(method, self.num_drafts) for method in self.ways]
        if temperature == 0:
            pairs += [
                (method, num) for method in self.lengthened for num in self.lengths
            ]
        return [*dict.fromkeys(pairs)]


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


class DecodingRuns(lab.ResultTable):
    """Counts and times of each method, with plain decoding of the same batch."""

    way: lab.Texts = lab.column("key of `serving.DECODING_METHODS`")
    num_drafts: lab.Ints = lab.column("draft length", heading="drafts")
    batch: lab.Ints = lab.column("batch size")
    temperature: lab.Floats = lab.column("0 is greedy")
    steps: lab.Ints = lab.column("steps, summed over sequences", is_reported=False)
    emitted: lab.Ints = lab.column("tokens of these steps", is_reported=False)
    drafted: lab.Ints = lab.column("verified draft tokens", is_reported=False)
    first: lab.Ints = lab.column(
        "steps that accepted the first draft token", is_reported=False
    )
    step_s: Float[np.ndarray, "rows rounds"] = lab.column(
        "time of a step of the batch", heading="a step", of=np.median
    )
    plain_s: Float[np.ndarray, "rows rounds"] = lab.column(
        "time of a plain step", heading="a plain step", of=np.median
    )
    num_tokens: lab.Ints = lab.column("tokens of all answers", heading="tokens")
    num_other: lab.Ints = lab.column(
        "tokens that differ from plain decoding's", heading="other tokens"
    )

    @property
    @lab.computed_column(heading="drafts a step", form="{:.2f}")
    def drafts_per_step(self) -> np.ndarray:
        """Mean verified draft tokens per step; n-gram misses count as 0."""
        return self.drafted / self.steps

    @property
    @lab.computed_column(heading="tokens a step", form="{:.2f}")
    def tokens_per_step(self) -> np.ndarray:
        """Mean tokens per step of a sequence."""
        return self.emitted / self.steps

    @property
    @lab.computed_column(heading="accepted")
    def accepted_share(self) -> np.ndarray:
        """Acceptance rate over all verified draft tokens."""
        return (self.emitted - self.steps) / np.maximum(self.drafted, 1)

    @property
    @lab.computed_column(heading="first accepted")
    def first_share(self) -> np.ndarray:
        """Share of steps that accepted the first draft token; misses count as 0."""
        return self.first / self.steps

    @property
    @lab.computed_column(heading="by formula", form="{:.2f}")
    def expected(self) -> np.ndarray:
        """Tokens per step if each draft token were accepted like the first one."""
        return theory.expected_tokens(self.first_share, self.num_drafts)

    @property
    @lab.computed_column(heading="step / plain step", form="{:.2f}")
    def cost(self) -> np.ndarray:
        """Cost of a step / plain step, median over rounds."""
        return serving.relative_costs(self.step_s, self.plain_s)

    @property
    @lab.computed_column(heading="times as fast", form="{:.2f}")
    def speed(self) -> np.ndarray:
        """Tokens/s over those of plain decoding."""
        return self.tokens_per_step / self.cost


class SyntheticDrafts(IndependentDrafts):
    """Steps with synthetic acceptance, against the formula."""

    @property
    @lab.computed_column(heading="off", form="{:+.2%}")
    def off(self) -> np.ndarray:
        """Deviation from the formula, as a share."""
        return self.tokens_per_step / self.expected - 1

    @property
    @lab.computed_column(heading="standard error", form="{:.2%}")
    def error(self) -> np.ndarray:
        """Standard error of tokens per step by formula, as a share."""
        return self.chance_error / self.expected


class Result(lab.ResultRecord):
    """Measured methods and synthetic drafts."""

    runs: DecodingRuns = lab.column("by method")
    coins: SyntheticDrafts = lab.column("by acceptance rate and draft length")
    output_tokens: int = lab.column("tokens of each answer", is_reported=False)
    num_drafts: int = lab.column("draft length of the comparison", is_reported=False)
    device: str = lab.column("kind of device")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Runs every method, then synthetic drafts; if stopped, keeps finished parts.

    Raises:
      ValueError: the model cannot be served, or its context is too short.
    """
    longest = max(config.max_length, config.prompt_tokens + config.coin_tokens)
    model = load_text_model(config.model, max_length=longest)
    settings = [(1, x) for x in TEMPERATURES] + [(num, 0.0) for num in config.batches]
    rows = held_out.decode_in_turns(config, model, settings, config.cases, progress)
    runs = DecodingRuns.of(rows)
    coins = []
    num = config.num_coins
    drafts = config.coin_drafts
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
            counts += [serving.steps_with_drafts(server, length) for length in drafts]
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
    "plain step, the median of alternating rounds. First accepted: share of all steps; "
    "without an n-gram match a step has no draft and feeds one row, like a plain step.",
    "By formula: if each draft token were accepted like the first, independently. On "
    "text, correct n-grams continue to be correct, so that more is accepted than by "
    "the formula; early exit is close to it.",
    "N-gram drafts. Texts are the same for every batch size up to their number; the "
    "cost of a step rises.",
)


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of methods, draft lengths, batch sizes and synthetic drafts."""
    runs = result.runs
    num = result.num_drafts
    single = runs.where(batch=1)
    lengths = single.where(temperature=0.0)
    batches = runs.where(temperature=0.0)
    lengths = lengths.at(np.lexsort((lengths.num_drafts, lengths.way)))
    columns = ("drafts_per_step", "accepted_share", "first_share", "tokens_per_step")
    speed = ("cost", "speed")
    same = ("num_tokens", "num_other")
    names = ("way", "temperature", *columns, *speed, *same)
    drafts = ("way", "num_drafts", *columns[2:], "expected", *speed)
    together = ("batch", "tokens_per_step", "step_s", "plain_s", *speed, *same)
    ways = single.where(num_drafts=num)
    batches = batches.where(way=LOOKUP, num_drafts=num)
    title = f"ways, one sequence on {result.device}"
    sheets: list[lab.Sheet] = [
        ways.sheet(title, *names, note=NOTES[0]),
        lengths.sheet("drafts a step, greedy", *drafts, note=NOTES[1]),
        batches.sheet("sequences at once, greedy", *together, note=NOTES[2]),
        result.coins.sheet("synthetic drafts, against the formula"),
    ]
    return [sheet for sheet in sheets if sheet.rows]


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares tokens, formulas and speeds with published or expected values."""
    runs = result.runs
    coins = result.coins
    few = result.output_tokens < FEW_TOKENS
    if len(runs):
        yield lab.measured(
            "lossless", runs.num_other.sum(), num=int(runs.num_tokens.sum())
        )
    if len(coins):
        steps = int(coins.steps.min())
        off = np.abs(coins.off).max()
        yield lab.measured("law", off, differs=steps < FEW_STEPS, steps=steps)
    for id, formula in (
        ("tokens", theory.tokens_per_step),
        ("operations", theory.operations_per_token),
    ):
        for chance, by_drafts in CLAIMS.published(id).items():
            for num in by_drafts:
                tokens = formula(float(chance), int(num))
                yield lab.measured(id, tokens, acceptance=chance, drafts=num)
    single = runs.where(batch=1, temperature=0.0)
    if len(single):
        best = single.at([int(np.nanargmax(single.speed))])
        yield lab.measured(
            "speed",
            best.speed[0],
            differs=few,
            way=best.way[0],
            drafts=best.num_drafts[0],
        )
    single = single.where(num_drafts=result.num_drafts)
    lookup, jacobi = (single.where(way=method) for method in (LOOKUP, JACOBI))
    if len(lookup):
        yield lab.measured("lookup", lookup.tokens_per_step[0], device=result.device)
    if len(jacobi):
        yield lab.measured("jacobi", jacobi.speed[0], device=result.device)
    batch_runs = runs.at(runs.batch > 1)
    if len(lookup) and len(batch_runs):
        largest_batch = batch_runs.at([int(np.argmax(batch_runs.batch))])
        gain = largest_batch.speed[0] / lookup.speed[0]
        yield lab.measured(
            "batch", gain, device=result.device, most=int(largest_batch.batch[0])
        )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws tokens per step, speeds by method and batch size, and synthetic drafts."""
    drawing.draw_speculation(axes, result.runs, result.coins, result.num_drafts)


STUDY = lab.Study(CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(2, 2))
