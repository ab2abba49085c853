"""Compares methods of speculative decoding, and adaptive draft lengths.

Every method continues the same held-out code with the same model, a single sequence,
greedily and at temperature 1, in the same rounds as plain decoding. `Coupled` verifies
the drafts, and every token is compared with plain decoding's. Tokens per step depend on
method, model and text. Speeds depend on this machine; the cost of a step is listed with
them.

Then adaptive draft lengths are compared with plain decoding for batches of 1 to many
sequences, in more rounds. An adaptive method drafts only if it is expected to pay, and
the overhead of this rule is measured.
"""

import functools
from collections.abc import Iterator
from typing import Annotated

import jax
import numpy as np

from experiments import lab
from experiments.decoding.speculation import held_out, on_text, serving
from experiments.decoding.speculation_zoo import drawing
from experiments.harness import Server, load_text_model
from jaxkv import validation
from jaxkv.engine import EngineConfig
from jaxkv.files import find_heads_folder
from jaxkv.speculation import HEAD_KINDS, load_heads

CLAIMS = lab.claims_file(__file__)
FEW_TOKENS = 128
"""Output tokens below which speeds have no verdict."""
METHOD_OF_PAPER = {
    "prompt lookup": "n-gram",
    "lookahead": "lookahead",
    "Medusa": "Medusa, tree",
    "EAGLE": "EAGLE, chain",
    "EAGLE-2": "EAGLE, tree",
}
"""Published methods, with the nearest method here."""


class Config(held_out.TextConfig):
    """Text, methods and lengths."""

    draft: str = ""
    """Draft model for the method "draft model"; empty without that method."""
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
    """Methods with draft lengths. With the token before them a step has 4, 8 or 16
    rows, the tile sizes of CPU matrix products."""
    adaptive: tuple[tuple[str, int], ...] = (("n-gram, adaptive", 7),)
    """Adaptive methods with the largest draft length; a step has 8, 4 or 1 rows."""
    batches: lab.AscendingInts = (1, 2, 4, 8, 16, 32)
    """Batch sizes of the adaptive methods."""
    temperatures: Annotated[tuple[float, ...], lab.Range(0, 2)] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    adaptive_rounds: lab.PositiveInt = 9
    """Rounds of the adaptive methods."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        adapt = {
            method_name
            for method_name, method in serving.DECODING_METHODS.items()
            if method.adaptive
        }
        for name, method_names in (
            ("ways", {*serving.DECODING_METHODS} - adapt - {serving.PLAIN_DECODING}),
            ("adaptive", adapt),
        ):
            for method_name, num in getattr(self, name):
                validation.choice(f"self.{name}", method_name, sorted(method_names))
                validation.integer(f"drafts of {method_name}", num, low=1)
        drafting = any(method_name == "draft model" for method_name, _ in self.ways)
        if drafting != bool(self.draft):
            raise ValueError(f"draft={self.draft!r} goes with the way 'draft model'")
        drafts = [num for _, num in (*self.ways, *self.adaptive)]
        self.check_answer_length(max(drafts, default=1))


CONFIGS = {
    "real": Config(),
    # `jaxkv run bundled_model deep` trains the target in more than an hour.
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


class Result(lab.ResultRecord):
    """Measured methods."""

    ways: on_text.DecodingRuns = lab.column("single sequence by method")
    adaptive: on_text.DecodingRuns = lab.column("adaptive methods by batch size")
    output_tokens: int = lab.column("tokens of each answer", is_reported=False)
    device: str = lab.column("kind of device")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Runs every method in turns, then the adaptive ones; if stopped, keeps finished.

    Raises:
      ValueError: the model cannot be served, its context is too short, or it has no
        heads for a method that needs them.
    """
    model = load_text_model(config.model, max_length=config.max_length)
    draft = None
    if config.draft:
        draft = load_text_model(config.draft, max_length=config.max_length)
    heads = {
        kind: load_heads(
            find_heads_folder(config.model, kind), model.config, dtype="float32"
        )
        for kind in HEAD_KINDS
        if any(
            serving.DECODING_METHODS[method_name].method == kind
            for method_name, _ in (*config.ways, *config.adaptive)
        )
    }

    def serve(method_name: str, bounds: EngineConfig) -> Server:
        trained_heads = heads.get(serving.DECODING_METHODS[method_name].method or "")
        return serving.make_server(
            model, method_name, bounds, heads=trained_heads, draft=draft
        )

    decode = functools.partial(
        held_out.decode_in_turns, config, model, progress=progress, serve=serve
    )
    single = [(1, temperature) for temperature in config.temperatures]
    ways = on_text.DecodingRuns.of(decode(single, lambda _: config.ways))
    batches = [(b, t) for b in config.batches for t in config.temperatures]
    rounds = config.adaptive_rounds
    adapting = decode(batches, lambda _: config.adaptive, rounds=rounds)
    adaptive = on_text.DecodingRuns.of(adapting)
    kind = jax.devices()[0].device_kind
    return Result(ways, adaptive, config.output_tokens, kind)


NOTES = (
    "Tokens a step depend on method, model and text; times as fast is that number over "
    "step / plain step. First accepted: share of all steps; for a tree, that one of "
    "the root's children was accepted.",
    "An adaptive draft length falls to 0 where drafting does not pay, by recent "
    "acceptance and measured costs of steps, and is then close to plain decoding.",
)


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of methods and of adaptive draft lengths."""
    columns = ("drafts_per_step", "first_share", "tokens_per_step", "cost", "speed")
    same = ("num_tokens", "num_other")
    title = f"one sequence on {result.device}"
    names = ("way", "num_drafts", *columns, *same)
    greedy, random_runs = (result.ways.where(temperature=x) for x in (0.0, 1.0))
    settings = ("way", "batch", "temperature", columns[0], *columns[2:], *same)
    sheets: list[lab.Sheet] = [
        greedy.sheet(f"{title}, greedy", *names, note=NOTES[0]),
        random_runs.sheet(f"{title}, temperature 1", *names),
        result.adaptive.sheet("adaptive draft lengths", *settings, note=NOTES[1]),
    ]
    return [sheet for sheet in sheets if sheet.rows]


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares tokens, acceptance and speeds with published or expected values."""
    ways = result.ways
    adaptive = result.adaptive
    few = result.output_tokens < FEW_TOKENS
    other, total = (
        sum(int(getattr(runs, name).sum()) for runs in (ways, adaptive))
        for name in ("num_other", "num_tokens")
    )
    if total:
        yield lab.measured("lossless", other, num=total)
    if len(adaptive):
        speeds = adaptive.speed
        yield lab.measured("mean", np.exp(np.log(speeds).mean()), differs=few)
        worst = adaptive.at([int(np.argmin(speeds))])
        yield lab.measured(
            "worst",
            worst.speed[0],
            differs=few,
            way=worst.way[0],
            batch=int(worst.batch[0]),
            temperature=worst.temperature[0],
        )
    drafters = ("EAGLE", "draft model")
    trained = ways.at(
        np.array([method_name.startswith(drafters) for method_name in ways.way], bool)
    )
    sure = trained.at(trained.first_share >= 0.75) if len(trained) else trained
    if len(sure):
        best = sure.at([int(np.argmax(sure.speed))])
        yield lab.measured(
            "pair",
            best.speed[0],
            differs=few,
            way=best.way[0],
            drafts=int(best.num_drafts[0]),
            temperature=best.temperature[0],
            first=best.first_share[0],
        )
    greedy = ways.where(temperature=0.0)
    for method, method_name in METHOD_OF_PAPER.items():
        selected = greedy.where(way=method_name)
        if len(selected):
            tokens = float(selected.tokens_per_step.max())
            yield lab.measured("tokens", tokens, method=method, device=result.device)
    chain, tree = (greedy.where(way=f"Medusa, {x}") for x in ("chain", "tree"))
    if len(chain) and len(tree):
        gain = tree.tokens_per_step.max() / chain.tokens_per_step.max()
        yield lab.measured("trees", gain, device=result.device)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws tokens and speeds of all methods, costs, and adaptive methods by batch."""
    drawing.draw_methods(axes, result.ways, result.adaptive)


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(2, 2, 5.6)
)
