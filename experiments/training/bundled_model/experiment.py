"""Trains the bundled byte-level model on Python's standard library.

The `shipped` config trained the model in `models/stdlib-bytes`: a constant learning
rate on short windows (the trunk), then a cooldown on windows as long as served
contexts. The same command resumes a stopped run. `deep` trains a model with 3 times as
many layers, for which the shipped one is a draft model. `deepseek` trained the model in
`models/stdlib-bytes-deepseek`, with the layers of DeepSeek-V3.
"""

import dataclasses
import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from experiments import lab
from jaxkv import files
from jaxkv.models import Experts, LatentConfig, ModelConfig, save_model
from jaxkv.text import ByteTokenizer
from scaling import training
from scaling.corpora import (
    END_TOKEN,
    VOCAB_SIZE,
    CorpusConfig,
    TextSplit,
    count_bytes,
    describe_source,
    encode_documents,
    load_documents,
)
from scaling.training import (
    NEXT_TOKEN,
    MultiTokenPrediction,
    TrainConfig,
    TrainingObjective,
    score_documents,
    serving_config,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Config(lab.ConfigRecord):
    """Training of the trunk and the cooldown, and the export folder."""

    trunk: TrainConfig
    """Run at a constant learning rate, `cooldown_steps=0`."""
    cooldown_steps: lab.PositiveInt
    """Steps of linear decay to 0 after the trunk."""
    cooldown_batch_size: int
    """Windows per step of the cooldown."""
    cooldown_seq_len: int
    """Predictions per window of the cooldown and of scoring."""
    folder: str = ""
    """Folder of checkpoints to resume from; empty: not kept."""
    export: str = ""
    """Folder for the trained model in bfloat16; empty: not exported."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.trunk.cooldown_steps:
            raise ValueError(
                f"trunk.cooldown_steps={self.trunk.cooldown_steps!r} must be 0"
            )
        if not isinstance(self.trunk.corpus, CorpusConfig):
            raise ValueError(f"trunk.corpus={self.trunk.corpus!r} must be text")

    @property
    def text(self) -> CorpusConfig:
        """Training text."""
        assert isinstance(self.trunk.corpus, CorpusConfig)
        return self.trunk.corpus

    @property
    def objective(self) -> TrainingObjective:
        """Training objective: that of the model's modules for multi-token prediction.

        Without modules it is the next-token loss.
        """
        model = serving_config(self.trunk.model)
        if not model.num_ahead_layers:
            return NEXT_TOKEN
        return MultiTokenPrediction()

    @property
    def cooldown(self) -> TrainConfig:
        """Run that starts from the trunk's last checkpoint."""
        return dataclasses.replace(
            self.trunk,
            num_steps=self.trunk.num_steps + self.cooldown_steps,
            warmup_steps=0,
            cooldown_steps=self.cooldown_steps,
            batch_size=self.cooldown_batch_size,
            seq_len=self.cooldown_seq_len,
        )


_SHIPPED = Config(
    trunk=TrainConfig(
        model=ModelConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=160,
            num_layers=4,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=64,
            mlp_size=432,
            max_positions=1024,
        ),
        batch_size=8,
        seq_len=256,
        num_steps=9000,
        warmup_steps=100,
        cooldown_steps=0,
        learning_rate=1e-2,
        report_every=25,
        checkpoint_every=250,
    ),
    cooldown_steps=1000,
    cooldown_batch_size=8,
    cooldown_seq_len=512,
    folder="runs/stdlib-bytes",
    export="jaxkv/bundled_models/stdlib-bytes",
)
_DEEPSEEK_MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=4,
    head_dim=48,
    mlp_size=240,
    max_positions=1024,
    norm_eps=1e-6,
    tie_embeddings=False,
    latent=LatentConfig(kv_rank=48, q_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
    num_ahead_layers=1,
    experts=Experts(
        num_experts=16,
        top_k=4,
        size=48,
        shared_size=48,
        scoring="sigmoid",
        gate_bias=True,
        num_groups=4,
        top_groups=2,
        scale=2.0,
        num_dense_layers=1,
        balance_weight=0.0,
        bias_rate=1e-3,
    ),
    family="deepseek_v3",
)
_DEEP_MODEL = dataclasses.replace(_SHIPPED.trunk.model, num_layers=12, mlp_size=416)

CONFIGS = {
    "smoke": Config(
        trunk=TrainConfig(
            model=ModelConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=16,
                num_layers=1,
                num_q_heads=2,
                num_kv_heads=1,
                head_dim=8,
                mlp_size=32,
                max_positions=64,
            ),
            # Little text is held out, so that scoring is quick.
            corpus=CorpusConfig(held_out=0.02),
            batch_size=8,
            seq_len=32,
            num_steps=40,
            warmup_steps=5,
            cooldown_steps=0,
            learning_rate=1e-2,
        ),
        cooldown_steps=10,
        cooldown_batch_size=4,
        cooldown_seq_len=64,
    ),
    "shipped": _SHIPPED,
    "deep": dataclasses.replace(
        _SHIPPED,
        trunk=dataclasses.replace(_SHIPPED.trunk, model=_DEEP_MODEL, num_steps=2700),
        cooldown_steps=450,
        folder="runs/stdlib-bytes-deep",
        export="runs/stdlib-bytes-deep/model",
    ),
    "deepseek": dataclasses.replace(
        _SHIPPED,
        trunk=dataclasses.replace(
            _SHIPPED.trunk,
            model=_DEEPSEEK_MODEL,
            num_steps=500,
            learning_rate=1.5e-2,
        ),
        cooldown_steps=100,
        folder="runs/stdlib-bytes-deepseek",
        export="jaxkv/bundled_models/stdlib-bytes-deepseek",
    ),
}


class Result(lab.ResultRecord):
    """Training curve and final bits per byte; NaN if training did not end."""

    tokens: np.ndarray = lab.column("trained tokens at each report, over both runs")
    loss: np.ndarray = lab.column(
        "training loss in nats per token since the last report"
    )
    status: str = lab.column("status of the last run: `done`, `stopped` or `diverged`")
    num_params: int = lab.column("parameters of the model")
    bits_per_byte: float = lab.column(
        "on held-out documents, with weights rounded to bfloat16",
        heading="held-out bits per byte",
        key="held_out_bits_per_byte",
    )
    bits_per_byte_float32: float = lab.column(
        "before rounding",
        heading="held-out bits per byte, float32",
        key="held_out_bits_per_byte_float32",
    )
    num_held_out_bytes: int = lab.column("bytes of the held-out documents")
    duration_s: float = lab.column(
        "wall-clock time of training", key="train_duration_s"
    )

    @property
    @lab.computed_column()
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self.tokens[-1]) if len(self.tokens) else 0


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains, scores held-out text and exports."""
    split = load_documents(config.text)
    with files.folder_or_temporary(config.folder) as folder:
        train = functools.partial(
            training.train, objective=config.objective, progress=progress
        )
        runs = [train(config.trunk, folder / "trunk")]
        if runs[0].status == "done":
            at = folder / "cooldown"
            start = runs[0].checkpoint
            runs.append(train(config.cooldown, at, start=start))
    params = runs[-1].params
    done = len(runs) == 2 and runs[-1].status == "done"
    tokens = []
    loss = []
    before = 0
    for part in runs:
        tokens += [before + line["tokens"] for line in part.curve]
        loss += [line["loss"] for line in part.curve]
        before = tokens[-1] if tokens else 0

    def scored(dtype: str) -> float:
        if not done:
            return float("nan")
        score = score_documents(
            jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params),
            split.held_out,
            model=config.trunk.model,
            seq_len=config.cooldown_seq_len,
        )
        return score.bits_per_byte

    result = Result(
        tokens=np.asarray(tokens, np.int64),
        loss=np.asarray(loss),
        status=runs[-1].status,
        num_params=sum(x.size for x in jax.tree.leaves(params)),
        bits_per_byte=scored("bfloat16"),
        bits_per_byte_float32=scored("float32"),
        num_held_out_bytes=count_bytes(split.held_out),
        duration_s=sum(part.curve[-1]["duration_s"] for part in runs if part.curve),
    )
    if done and config.export:
        model = serving_config(config.trunk.model)
        save_model(
            config.export,
            model,
            params,
            tokenizer=ByteTokenizer(model.vocab_size),
            model_card=model_card(config, split, result),
            dtype="bfloat16",
            overwrite=True,
        )
    return result


def plot(ax: "Axes", result: Result) -> None:
    """Draws the training loss by tokens, and the final held-out loss."""
    loss = result.loss / np.log(2)
    lab.draw_curve(ax, result.tokens / 1e6, loss, 5, "training", marker="")
    title = "Loss of training"
    if np.isfinite(result.bits_per_byte):
        title = (
            f"Training ends at {result.bits_per_byte:.3f} bits/byte on held-out files"
        )
        lab.draw_reference_line(ax, result.bits_per_byte, "held-out files, at the end")
    x = "tokens trained on [millions]"
    y = "loss [bits/byte]"
    lab.set_labels(ax, title, x, y, yscale="log")
    lab.label_log_axis(ax.yaxis)
    ax.legend()


def model_card(config: Config, split: TextSplit, result: Result) -> str:
    """Returns the model card in Markdown; all numbers are the run's."""
    model = serving_config(config.trunk.model)
    trunk = config.trunk
    epochs = result.num_tokens / len(encode_documents(split.train))
    data = describe_source(config.text)
    window = config.cooldown_seq_len
    rows = [
        ("held-out bits per byte, these bfloat16 weights", result.bits_per_byte),
        ("the same before rounding to bfloat16", result.bits_per_byte_float32),
        ("training loss of the last report, nats per token", result.loss[-1]),
    ]
    name = "shipped"
    drafts = ""
    loss = ""
    if num := model.num_ahead_layers:
        name = "deepseek"
        drafts = " --speculate mtp"
        loss = f"""The loss is that of the next token, plus 0.3 times the mean loss of
        {num} module for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section
        2.2)."""
    parts = [
        f"---\nlicense: psf-2.0\ntags: [{model.family}, byte-level, code]\n---",
        f"# {Path(config.export).name}",
        f"""A decoder-only transformer of {result.num_params / 1e6:.2f} million
        parameters that writes text like {data}. It is small enough to ship with the
        project and to run on any machine: a model for tests and demonstrations of a
        serving engine, not for writing programs.""",
        "## Use",
        f"    jaxkv generate {Path(config.export).name} --prompt 'def '{drafts}",
        f"""Tokens 0 to 255 are the bytes of UTF-8 text; token {END_TOKEN} ends a
        document and also precedes one. Contexts of up to {window} tokens were
        trained.""",
        "## Shape",
        describe_shape(model),
        "## Data",
        f"""{data[0].upper()}{data[1:]}, without tests, code tables, generated texts and
        copies: {len(split.train)} files of {count_bytes(split.train):,} bytes
        to train on, {len(split.held_out)} files of {result.num_held_out_bytes:,} bytes
        held out. Files are held out whole, by a hash of their names;
        `scaling.corpora.held_out_files()` lists them.""",
        "## Result",
        "| | |\n|---|---|\n" + "\n".join(f"| {k} | {v:.4f} |" for k, v in rows),
        f"""Held-out files are scored in consecutive windows of {window} tokens, every
        byte and every document's end once.""",
        "## Training",
        f"    jaxkv run bundled_model {name}",
        f"""{result.num_tokens:,} tokens ({epochs:.1f} epochs):
        {trunk.num_steps:,} steps of {trunk.batch_size} x {trunk.seq_len} tokens at a
        constant learning rate of {trunk.learning_rate}, then
        {config.cooldown_steps:,} steps of {config.cooldown_batch_size} x {window} while
        it falls to zero. Muon for the layers' matrices, AdamW for other parameters,
        seed {trunk.seed}. {loss} {training_note(result.duration_s)}""",
    ]
    return card_text(parts)


def describe_shape(model: ModelConfig) -> str:
    """Returns a paragraph on the architecture and sizes of a model."""
    sizes = f"hidden size {model.hidden_size}, {model.num_layers} layers"
    ends = f"MLP {model.mlp_size}, vocabulary {model.vocab_size}. Weights in bfloat16."
    latent = model.latent
    experts = model.experts
    if latent is None or experts is None:
        return f"""Llama architecture (RMS norm, rotary positions, SwiGLU, tied
        embeddings): {sizes}, {model.num_q_heads} query and {model.num_kv_heads} KV
        heads of {model.head_dim}, {ends}"""
    return f"""DeepSeek-V3 architecture: {sizes}, {model.num_q_heads} heads of latent
    attention (latent {latent.kv_rank}, compressed query {latent.q_rank}, heads of
    {latent.nope_dim} without positions and {latent.rope_dim} with, values of
    {latent.value_dim}), {experts.num_experts} routed experts of {experts.size} in
    {experts.num_groups} groups, {experts.top_k} of them per token from
    {experts.top_groups} groups, a shared expert of {experts.shared_size},
    {experts.num_dense_layers} first layer without experts, {model.num_ahead_layers}
    module for multi-token prediction, {ends} Experts are balanced by bias."""


def training_note(duration_s: float) -> str:
    """Returns a sentence on training time, processor and versions."""
    env = lab.describe_machine()
    versions = env["versions"]
    return (
        f"It took {duration_s:,.0f} seconds on the clock of {env['num_cpus']} cores "
        f"({env['cpu']}) that other work shared, with Python {versions['python']}, jax "
        f"{versions['jax']}, optax {versions['optax']}."
    )


def card_text(parts: Sequence[str]) -> str:
    """Returns the Markdown of a model card, licence included."""
    licence = """The text is under the licence of the Python Software Foundation; the
        weights are under the same terms."""
    # Paragraphs are wrapped; headings, tables and commands are kept.
    filled = [
        part
        if part.startswith(("-", "#", "|", "    "))
        else textwrap.fill(" ".join(part.split()), 88, break_on_hyphens=False)
        for part in (*parts, "## Licence", licence)
    ]
    return "\n\n".join(filled) + "\n"


STUDY = lab.Study(CONFIGS, Result, run, plot)
