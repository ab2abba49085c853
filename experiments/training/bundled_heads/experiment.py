"""Trains the bundled Medusa and EAGLE heads, and measures their acceptance.

The `shipped` config trained the heads in `models/stdlib-bytes-medusa` and
`models/stdlib-bytes-eagle`, which draft for the bundled model. The model is frozen, and
heads learn its output distribution on its training text. Drafts are scored on greedy
answers to held-out files.
"""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments import lab
from experiments.harness import make_benchmark_config, make_engine
from experiments.training.bundled_model import experiment as bundled_model
from jaxkv.files import model_folder
from jaxkv.models import LoadedModel, ModelConfig, Params, load_model
from jaxkv.sampling import Sampling
from jaxkv.speculation import EagleConfig, HeadsConfig, MedusaConfig, save_heads
from scaling.corpora import (
    CorpusConfig,
    describe_source,
    encode_documents,
    load_documents,
    open_corpus,
)
from scaling.training import (
    HeadRecipe,
    TrainConfig,
    acceptance_rates,
    stream_windows,
    train_heads,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["medusa", "eagle"]

_TRUNK = bundled_model.CONFIGS["shipped"].trunk


class Config(lab.ConfigRecord):
    """Heads, their training, and the export folders."""

    model: str = "stdlib-bytes"
    """Target model: a folder or a bundled model, of the shape that the recipes name."""
    kinds: Annotated[tuple[Kind, ...], lab.Choices(("medusa", "eagle"))] = (
        "medusa",
        "eagle",
    )
    """Kinds of heads, trained in this order."""
    medusa: HeadRecipe
    eagle: HeadRecipe
    num_blocks: lab.PositiveInt = 2
    """Residual blocks of each Medusa head."""
    taps: tuple[int, ...] = (2, 3, 4)
    """Features that EAGLE reads: inputs of these layers; the number of layers means the
    last hidden state."""
    num_ranks: lab.PositiveInt = 8
    """Best drafts of each depth that are scored."""
    num_answers: lab.PositiveInt = 256
    """Held-out pieces of text that the model continues, half as long as the training
    windows; as many tokens of each answer are scored."""
    export: str = ""
    """Prefix of the export folders in bfloat16, completed by the kind; empty: not
    exported."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for recipe in (self.medusa, self.eagle):
            if not isinstance(recipe.run.corpus, CorpusConfig):
                raise ValueError(f"{recipe.run.corpus=} must be text")

    def recipe(self, kind: Kind) -> HeadRecipe:
        """Returns the training recipe of a kind."""
        return self.medusa if kind == "medusa" else self.eagle

    def shape(self, kind: Kind, model: ModelConfig) -> HeadsConfig:
        """Returns the shape of the heads of a kind for a target model."""
        if kind == "eagle":
            return EagleConfig(target=model, taps=self.taps)
        depth = self.medusa.depth
        return MedusaConfig(target=model, num_heads=depth, num_blocks=self.num_blocks)


_TRAINING = TrainConfig(
    model=_TRUNK.model,
    batch_size=8,
    seq_len=256,
    num_steps=6000,
    warmup_steps=100,
    cooldown_steps=2000,
    learning_rate=2e-2,
    report_every=25,
)
_SMOKE_RECIPE = HeadRecipe(
    run=dataclasses.replace(
        _TRAINING,
        corpus=CorpusConfig(held_out=0.02),
        batch_size=2,
        seq_len=32,
        num_steps=20,
        warmup_steps=5,
        cooldown_steps=5,
        report_every=5,
    )
)
_SHORTER = dataclasses.replace(_TRAINING, num_steps=2700, cooldown_steps=900)

CONFIGS = {
    "smoke": Config(medusa=_SMOKE_RECIPE, eagle=_SMOKE_RECIPE, num_answers=8),
    "shipped": Config(
        medusa=HeadRecipe(run=_TRAINING),
        eagle=HeadRecipe(run=_SHORTER),
        export="jaxkv/bundled_models/stdlib-bytes",
    ),
}


class HeadTraining(lab.ResultTable):
    """Training of each kind of heads."""

    kind: lab.Texts = lab.column("kind of the heads")
    status: lab.Texts = lab.column("`done`, `stopped` or `diverged`")
    num_params: lab.Ints = lab.column("parameters of the heads", heading="parameters")
    num_tokens: lab.Ints = lab.column("trained tokens", heading="tokens")
    loss: lab.Floats = lab.column(
        "cross-entropy with the model's distribution in nats, mean of 10 last reports",
        heading="loss",
    )
    duration_s: lab.Floats = lab.column("wall-clock time of training")


class GuessAcceptance(lab.ResultTable):
    """Acceptance rates by depth and rank."""

    kind: lab.Texts = lab.column("kind of the heads")
    depth: lab.Ints = lab.column(
        "draft position after the model's own token", heading="depth"
    )
    rank: lab.Ints = lab.column("rank of the draft at its depth, 0 for the best")
    right_share: lab.Floats = lab.column(
        "share of correct drafts in greedy decoding",
        heading="right",
    )


class Result(lab.ResultRecord):
    """Trained heads and their acceptance rates."""

    heads: HeadTraining = lab.column("by kind")
    acceptance: GuessAcceptance = lab.column("with weights rounded to bfloat16")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains heads, scores held-out text and exports."""
    target = load_model(model_folder(config.model))
    heads = []
    acceptance = []
    for kind in config.kinds:
        recipe = config.recipe(kind)
        shape = config.shape(kind, target.config)
        corpus = open_corpus(recipe.run.corpus)
        head_run = train_heads(recipe, shape, target.params, corpus, progress=progress)
        params = jax.tree.map(
            lambda x: x.astype("bfloat16").astype(jnp.float32), head_run.params
        )
        lines = head_run.curve
        last = lines[-1] if lines else {"tokens": 0, "duration_s": 0.0}
        row = {
            "kind": kind,
            "status": head_run.status,
            "num_params": sum(x.size for x in jax.tree.leaves(params)),
            "num_tokens": last["tokens"],
            "loss": np.mean([x["loss"] for x in lines[-10:]]) if lines else np.nan,
            "duration_s": last["duration_s"],
        }
        heads.append(row)
        if head_run.status != "done":
            break
        shares = score_heads(config, kind, shape, params, target)
        acceptance += [(kind, *at, share) for at, share in np.ndenumerate(shares)]
        if config.export:
            save_heads(
                f"{config.export}-{kind}",
                shape,
                params,
                acceptance=shares.tolist(),
                model_card=heads_card(config, kind, row, shares),
                overwrite=True,
            )
    rows = [(kind, depth + 1, rank, x) for kind, depth, rank, x in acceptance]
    return Result(HeadTraining.of(heads), GuessAcceptance.of(rows))


def score_heads(
    config: Config,
    kind: Kind,
    shape: HeadsConfig,
    params: Params,
    target: LoadedModel,
) -> np.ndarray:
    """Returns the share of correct drafts by depth and rank, in greedy answers."""
    recipe = config.recipe(kind)
    held_out = open_corpus(recipe.run.corpus).held_out
    half = recipe.run.seq_len // 2
    num = config.num_answers
    pieces = stream_windows(held_out, seq_len=half - 1, num_windows=num)
    bounds = make_benchmark_config(16, 2 * half, max_sequences=64, queue_capacity=64)
    engine = make_engine(target, bounds, has_text=False)
    done = engine.generate(
        pieces.tolist(), Sampling.greedy(max_tokens=half, ignore_eos=True)
    )
    answers = np.array([x.answers[0].tokens for x in done], np.int32)
    return acceptance_rates(
        params,
        target.params,
        np.concatenate([pieces, answers], axis=1),
        heads=shape,
        depth=recipe.depth,
        num_ranks=config.num_ranks,
        start=half,
    )


def plot(ax: "Axes", result: Result) -> None:
    """Draws the acceptance rate of the best drafts by depth."""
    names = {"medusa": "Medusa", "eagle": "EAGLE"}
    ends = []
    for kind in result.acceptance.distinct("kind"):
        best = result.acceptance.where(kind=kind, rank=0)
        name = names.get(kind, kind)
        lab.draw_curve(ax, best.depth, 100 * best.right_share, name, name)
        ends.append(f"{name} {100 * best.right_share[0]:.0f} %")
    depths = result.acceptance.distinct("depth")
    title = f"First drafts that are correct: {', '.join(ends)}"
    x = "distance from the model's own token [tokens]"
    lab.set_labels(ax, title, x, "best guess right [%]")
    ax.set(xticks=depths or [1], ylim=(0, 100))
    if ends:
        ax.legend()


_ABOUT: dict[Kind, str] = {
    "medusa": """{num} Medusa heads (Cai et al. 2024, arXiv:2401.10774), each of
    {blocks} residual blocks on the last hidden state, then the model's own output
    matrix.""",
    "eagle": """An EAGLE-3 drafter (Li et al. 2025, arXiv:2503.01840): one layer like
    the model's own on fused features, the inputs of its layers {taps} (its number of
    layers denotes the last hidden state), and on the embedding of the next token;
    embeddings and output matrix are shared with the model.""",
}
_LOSS_TEXTS: dict[Kind, str] = {
    "medusa": "over the heads in parallel",
    "eagle": """the drafter unrolled for as many steps on its own states ("training-time
    test")""",
}


def heads_card(
    config: Config, kind: Kind, row: dict[str, Any], shares: np.ndarray
) -> str:
    """Returns the model card of heads in Markdown; all numbers are the run's."""
    recipe = config.recipe(kind)
    run = recipe.run
    text = recipe.run.corpus
    assert isinstance(text, CorpusConfig)
    split = load_documents(text)
    epochs = row["num_tokens"] / len(encode_documents(split.train))
    about = _ABOUT[kind].format(
        num=recipe.depth,
        blocks=config.num_blocks,
        taps=", ".join(map(str, config.taps)),
    )
    num_ranks = min(3, shares.shape[1])
    ranks = ["best", "second", "third"][:num_ranks]
    table = [
        f"| depth | {' | '.join(ranks)} |",
        "|---" * (1 + num_ranks) + "|",
        *(
            f"| {depth} | "
            + " | ".join(f"{x:.3f}" for x in depth_shares[:num_ranks])
            + " |"
            for depth, depth_shares in enumerate(shares, 1)
        ),
    ]
    name = model_folder(config.model).name
    parts = [
        "---\nlicense: psf-2.0\ntags: [speculative-decoding, byte-level, code]\n---",
        f"# {name}-{kind}",
        f"Heads that draft for [{name}](../{name}/README.md).",
        "## Use",
        f"    jaxkv generate {name} --prompt 'def ' --speculate {kind}",
        "## Shape",
        f"""{about} {row["num_params"]:,} weights in bfloat16, trained for this model
        only.""",
        "## Data",
        f"""The {len(split.train)} files of {describe_source(text)} that the
        model was trained on; the {len(split.held_out)} held-out files are those of the
        model.""",
        "## Result",
        "\n".join(table),
        f"""Share of drafts that equal the model's token, in greedy answers of
        {run.seq_len // 2} tokens to {config.num_answers} pieces of held-out files of
        {run.seq_len // 2} tokens each, at the steps of speculative decoding with the
        best drafts. Depth 1 is the token after the model's own last one. `config.json`
        has all ranks, for draft trees.""",
        "## Training",
        "    jaxkv run bundled_heads shipped",
        f"""{row["num_tokens"]:,} tokens ({epochs:.1f} epochs): {run.num_steps:,} steps
        of {run.batch_size} x {run.seq_len} tokens, learning rate {run.learning_rate}
        with {run.warmup_steps} steps of warm-up and {run.cooldown_steps:,} of decay to
        zero, Muon for matrices of layers, AdamW for other parameters, seed {run.seed}.
        The loss is the cross-entropy with the model's own distribution,
        {recipe.depth} drafts deep, each weighted {recipe.decay} of the one before it,
        {_LOSS_TEXTS[kind]}. It ended at {row["loss"]:.4f} nats.
        {bundled_model.training_note(row["duration_s"])}""",
    ]
    return bundled_model.card_text(parts)


STUDY = lab.Study(CONFIGS, Result, run, plot)
