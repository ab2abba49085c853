"""Jacobi decoding of whole blocks with the bundled model.

The model continues held-out code, block after block. The study counts the iterations of
blocks of m tokens, greedily and with fixed noise, and compares their tokens with plain
decoding. By the theorem a block takes at most m iterations, and every iteration fixes
another token. The engine's own Jacobi drafter shows the resulting speed.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import jax
import numpy as np
from jaxtyping import Int

from experiments import lab
from experiments.decoding.jacobi import blocks, drawing
from experiments.decoding.speculation import held_out, on_text, serving
from experiments.harness import load_text_model
from jaxkv.models import LoadedModel
from jaxkv.sampling import Sampling

CLAIMS = lab.claims_file(__file__)
WAY = "Jacobi"


class Config(held_out.TextConfig):
    """Text, blocks and lengths."""

    lengths: lab.AscendingInts = (4, 8, 16, 32)
    """Tokens of a block."""
    picture_tokens: lab.PositiveInt = 32
    """Tokens of the drawn block, the first of the first text."""
    temperatures: Annotated[tuple[float, ...], lab.Range(0, 2)] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    num_drafts: lab.AscendingInts = (3, 7, 15, 31)
    """Draft lengths of the engine's drafter."""
    steps_per_call: int = 4
    """Steps per call of the engine."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        longest = max(*self.lengths, self.picture_tokens)
        self.check_answer_length(self.num_drafts[-1], longest)


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        num_prompts=2,
        prompt_tokens=16,
        output_tokens=40,
        lengths=(2, 5),
        picture_tokens=6,
        temperatures=(0.0,),
        num_drafts=(2,),
        rounds=2,
        steps_per_call=2,
    ),
}


class BlockTable(lab.ResultTable):
    """Iterations of blocks by length and temperature."""

    length: lab.Ints = lab.column("tokens of a block", heading="tokens")
    temperature: lab.Floats = lab.column("0 is greedy")
    num_blocks: lab.Ints = lab.column("blocks", heading="blocks")
    steps: lab.Floats = lab.column("mean iterations", form="{:.2f}")
    most_steps: lab.Ints = lab.column(
        "most iterations of a block", heading="most steps"
    )
    num_late: lab.Ints = lab.column(
        "blocks with more iterations than tokens", heading="late"
    )
    num_stuck: lab.Ints = lab.column("iterations that fixed no token", heading="stuck")
    num_other: lab.Ints = lab.column(
        "tokens that differ from plain decoding's", heading="other tokens"
    )

    @property
    @lab.computed_column(heading="tokens a step", form="{:.2f}")
    def tokens_per_step(self) -> np.ndarray:
        """Mean block tokens per iteration."""
        return self.length / np.maximum(self.steps, 1e-9)


class BlockTrace(lab.ResultTable):
    """Iterations of one block."""

    tokens: Int[np.ndarray, "rows places"] = lab.column("guesses")
    fixed: lab.Ints = lab.column("length of the correct prefix")


DRAFTER = "the engine's drafter, one sequence on {0.device}"
DRAFTER_COLUMNS = (
    *("num_drafts", "tokens_per_step", "cost", "speed", "num_tokens", "num_other"),
)


class Result(lab.ResultRecord):
    """Iterations of blocks, and runs of the engine."""

    blocks: BlockTable = lab.column(
        "by length and temperature",
        heading="steps until a block is found",
        note="A block starts from guesses of token 0 after the text of plain decoding. "
        "Steps: iterations until the guesses stop changing. A model without "
        "fine-tuning seldom predicts a token correctly after a wrong one, so blocks "
        "take nearly as many steps as they have tokens.",
    )
    picture: BlockTrace = lab.column("one block", is_shown=False)
    runs: on_text.DecodingRuns = lab.column(
        "runs of the engine's drafter",
        heading=DRAFTER,
        columns=("temperature", *DRAFTER_COLUMNS),
        note="The engine's window moves with the text and keeps later guesses. Times "
        "as fast as plain decoding: tokens a step / relative cost of a step.",
    )
    output_tokens: int = lab.column("tokens of each answer", is_reported=False)
    device: str = lab.column("kind of device", is_shown=False)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Finds blocks, then decodes with the engine; if stopped, keeps finished parts.

    Raises:
      ValueError: the model cannot be served, or its context is too short.
    """
    model = load_text_model(config.model, max_length=config.max_length)
    cases = [(t, m) for t in config.temperatures for m in config.lengths]
    answers: dict[float, list[list[int]]] = {}
    rows = []
    for temperature, length in progress.track(cases, "blocks of", "lengths"):
        texts, asks = config.requests(model.tokenizer, (1, temperature))
        if temperature not in answers:
            bounds = serving.drafting_engine_config(
                1, 0, config.max_length, config.steps_per_call
            )
            server = serving.make_server(model, serving.PLAIN_DECODING, bounds)
            answers[temperature], _ = serving.decode_batches(server, texts, asks)
        rows.append(_count_blocks(model, texts, asks, answers[temperature], length))
    settings = [(1, temperature) for temperature in config.temperatures]
    ways = [(WAY, num) for num in config.num_drafts]
    runs = held_out.decode_in_turns(config, model, settings, lambda _: ways, progress)
    runs = on_text.DecodingRuns.of(runs)
    kind = jax.devices()[0].device_kind
    # The drawn block is the first of the first text, greedily.
    texts, asks = config.requests(model.tokenizer, (1, 0.0))
    [block] = blocks.find_jacobi_blocks(
        model, texts[:1], asks[:1], config.picture_tokens
    )
    picture = BlockTrace.of(zip(block.guesses, block.fixed, strict=True))
    return Result(BlockTable.of(rows), picture, runs, config.output_tokens, kind)


def _count_blocks(
    model: LoadedModel,
    texts: list[list[int]],
    asks: list[Sampling],
    answers: list[list[int]],
    length: int,
) -> tuple[Any, ...]:
    """Returns a row of `BlockTable` from the whole blocks of all answers."""
    contexts = []
    wanted = []
    samplings = []
    for text, ask, answer in zip(texts, asks, answers, strict=True):
        for start in range(0, len(answer) - length + 1, length):
            contexts.append(text + answer[:start])
            wanted.append(answer[start : start + length])
            samplings.append(ask)
    jacobi_blocks = blocks.find_jacobi_blocks(model, contexts, samplings, length)
    steps = np.array([block.steps for block in jacobi_blocks])
    stuck = sum(int((np.diff(block.fixed[:-1]) < 1).sum()) for block in jacobi_blocks)
    other = sum(
        int((block.tokens != np.array(tokens)).sum())
        for block, tokens in zip(jacobi_blocks, wanted, strict=True)
    )
    late = int((steps > length).sum())
    counts = len(jacobi_blocks), steps.mean(), steps.max(), late, stuck, other
    return (length, asks[0].temperature, *counts)


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares iterations with the theorem, and speeds with published ones."""
    block_table = result.blocks
    runs = result.runs
    if len(block_table):
        num = int(block_table.num_blocks.sum())
        yield lab.measured("steps", block_table.num_late.sum(), num=num)
        yield lab.measured("progress", block_table.num_stuck.sum(), num=num)
    other = sum(int(x.num_other.sum()) for x in (block_table, runs))
    tokens = int(
        (block_table.num_blocks * block_table.length).sum() + runs.num_tokens.sum()
    )
    if tokens:
        yield lab.measured("lossless", other, num=tokens)
    greedy = runs.where(temperature=0.0)
    if len(greedy):
        yield lab.measured("speed", np.nanmax(greedy.speed), device=result.device)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the iterations of one block, iterations by length, and speeds."""
    drawing.draw_jacobi(axes, result.picture, result.blocks, result.runs)


STUDY = lab.Study(CONFIGS, Result, run, plot, claims, panels=lab.Panels(2, 2))
