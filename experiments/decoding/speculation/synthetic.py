"""Speculation with synthetic acceptance: measured speed-up against theory.

Each draft token is accepted with a given probability, and drafting costs no time.
Tokens per step must follow the formula, and the speed-up is that number over the
relative cost of a verifying step, which is measured. Weights are random, since their
values do not affect speed. All settings alternate with plain decoding of a single
sequence.
"""

import collections
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.decoding.speculation import drawing, serving
from experiments.decoding.speculation.serving import PLAIN_DECODING
from experiments.decoding.speculation.theory import IndependentDrafts
from experiments.harness import Server, load_benchmark_model, measure_in_turns
from jaxkv.engine import Speculation
from jaxkv.sampling import Sampling
from jaxkv.speculation import Jacobi, Synthetic

CLAIMS = lab.claims_file(__file__)
FEW_STEPS = 30
"""Fewest steps of a case below which no verdict is given."""


class Config(lab.ConfigRecord):
    """Model shape, acceptance rates, draft lengths and tokens."""

    shape: str = "random-135m"
    """A name in `model_shapes.RANDOM_SHAPES`, a bundled model or a folder."""
    chances: lab.Shares = (0.5, 0.7, 0.9)
    """Acceptance rates of a draft token."""
    drafts: lab.AscendingInts = (1, 3, 7)
    """Draft lengths."""
    prompt_tokens: lab.PositiveInt = 32
    """Random tokens of the prompt."""
    output_tokens: int = 160
    """Tokens of each answer."""
    rounds: lab.PositiveInt = 3
    """Rounds, each with its own answer and acceptance draws."""
    steps_per_call: lab.PositiveInt = 4
    """Steps per call of the engine."""
    seed: lab.NonNegativeInt = 0
    """Seed of prompts and acceptance draws."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        # A call that prefills, and another one that does not end the answer.
        if self.output_tokens <= (min_tokens := self.warmup_tokens):
            raise ValueError(
                f"output_tokens={self.output_tokens!r} must be more than {min_tokens}"
            )

    @property
    def warmup_tokens(self) -> int:
        """Tokens of the warm-up answer that compiles the programs."""
        return 2 * self.steps_per_call * (1 + self.drafts[-1])

    def request(
        self, turn: int, vocab_size: int, max_tokens: int
    ) -> tuple[list[list[int]], list[Sampling]]:
        """Returns a prompt and its sampling."""
        rng = np.random.default_rng((self.seed, turn))
        prompt = rng.integers(0, vocab_size, self.prompt_tokens).tolist()
        ask = Sampling(
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            seed=self.seed + turn,
        )
        return [prompt], [ask]


CONFIGS = {"synthetic": Config()}


class TimedDrafts(IndependentDrafts):
    """Times of steps by acceptance rate and draft length, with plain decoding."""

    step_s: Float[np.ndarray, "rows rounds"] = lab.column(
        "time of a step", heading="a step", of=np.median
    )
    plain_s: Float[np.ndarray, "rows rounds"] = lab.column(
        "time of a plain step", heading="a plain step", of=np.median
    )

    @property
    @lab.computed_column(heading="standard errors off", form="{:+.1f}")
    def errors_off(self) -> np.ndarray:
        """Deviation from the formula in standard errors; 0 without randomness."""
        error = self.chance_error
        off = self.tokens_per_step - self.expected
        return off / np.where(error > 0, error, np.inf)

    @property
    @lab.computed_column(heading="step / plain step", form="{:.2f}")
    def cost(self) -> np.ndarray:
        """Cost of a verifying step / plain step, median over rounds."""
        return serving.relative_costs(self.step_s, self.plain_s)

    @property
    @lab.computed_column(heading="times as fast", form="{:.2f}")
    def speed(self) -> np.ndarray:
        """Tokens/s over those of plain decoding."""
        return self.tokens_per_step / self.cost

    @property
    @lab.computed_column(heading="by theory", form="{:.2f}")
    def predicted(self) -> np.ndarray:
        """Tokens per step by formula over the measured cost."""
        return self.expected / self.cost


class Result(lab.ResultRecord):
    """Measured steps."""

    priced: TimedDrafts = lab.column(
        "by acceptance rate and draft length",
        heading="{0.shape}, one sequence on {0.device}",
        note="Times as fast: tokens a step over step / plain step, the median of "
        "alternating rounds. By theory: tokens by formula over the same measured cost. "
        "Drafting costs no time here, so this is an upper bound at these acceptance "
        "rates.",
    )
    shape: str = lab.column("model shape", is_shown=False)
    device: str = lab.column("kind of device", is_shown=False)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Decodes with every acceptance rate in turns; if stopped, keeps finished ones.

    Raises:
      ValueError: the model does not exist, or its context is too short.
    """
    model = load_benchmark_model(config.shape, "float32")
    longest = config.prompt_tokens + config.output_tokens
    size = model.config.vocab_size
    turns = collections.Counter[Server]()

    def begin(num: int) -> list[Server]:
        """Returns compiled servers: plain decoding, then every acceptance rate."""
        servers = []
        for drafts, chance in ((0, 0.0), *((num, x) for x in config.chances)):
            judged = Speculation(Jacobi(), Synthetic(chance)) if drafts else None
            bounds = serving.drafting_engine_config(
                1, drafts, longest, config.steps_per_call
            )
            method = "Jacobi" if drafts else PLAIN_DECODING
            server = serving.make_server(model, method, bounds, judged)
            server.name = f"chance {chance:g}, {drafts} drafts"
            serving.decode_batches(
                server, *config.request(0, size, config.warmup_tokens)
            )
            servers.append(server)
        return servers

    def measure(num: int, server: Server) -> tuple[int, int, float]:
        """Returns steps with full draft length, their tokens, and seconds per step."""
        turns[server] += 1
        request = config.request(turns[server], size, config.output_tokens)
        _, counts = serving.decode_batches(server, *request)
        step_s = counts.call_s / max(counts.call_steps, 1)
        if not server.engine.config.max_drafts:
            return counts.steps, counts.emitted, step_s
        return *serving.steps_with_drafts(server, num), step_s

    rows: list[tuple[object, ...]] = []
    for num, servers, runs_by_server in measure_in_turns(
        config.drafts,
        config.rounds,
        begin,
        measure,
        progress=progress,
        bar_label="decoding",
        case_name="drafts",
    ):
        plain_s = np.array([step_s for *_, step_s in runs_by_server[servers[0].name]])
        for chance, server in zip(config.chances, servers[1:], strict=True):
            steps, emitted, step_s = zip(*runs_by_server[server.name], strict=True)
            counts = sum(steps), sum(emitted)
            rows.append((chance, num, *counts, np.array(step_s), plain_s))
    return Result(TimedDrafts.of(rows), config.shape, jax.devices()[0].device_kind)


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares tokens per step with the formula."""
    priced = result.priced
    if len(priced):
        steps = int(priced.steps.min())
        yield lab.measured(
            "chance",
            np.abs(priced.errors_off).max(),
            differs=steps < FEW_STEPS,
            steps=steps,
            num=len(priced),
            shape=result.shape,
        )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws tokens per step and speed by acceptance rate, with lines of theory."""
    drawing.draw_priced(axes, result.priced)


STUDY = lab.Study(CONFIGS, Result, run, plot, claims, panels=lab.Panels(1, 2))
