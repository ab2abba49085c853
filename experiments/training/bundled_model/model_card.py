"""The card of the model that `bundled_model` trains, in Markdown."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.framework import environment
from scaling.corpora import corpora
from scaling.training import architectures

if TYPE_CHECKING:
    from experiments.training.bundled_model.experiment import Config, Result


def text(config: "Config", split: corpora.Split, result: "Result") -> str:
    """Writes the card; every number in it is the run's.

    Args:
      config: what was run.
      split: the text it was run on.
      result: what came out, with the held-out text scored.
    """
    model, trunk = architectures.servable(config.trunk.model), config.trunk
    env = environment.describe()
    versions = env["versions"]
    num_tokens, num_train = int(result.tokens[-1]), len(corpora.tokens(split.train))
    data = corpora.describe(config.text)
    window = config.cooldown_seq_len
    rows = [
        ("held-out bits per byte, these bfloat16 weights", result.bits_per_byte),
        ("the same before rounding to bfloat16", result.bits_per_byte_float32),
        ("training loss at the end, nats per token", np.mean(result.loss[-10:])),
    ]
    parts = [
        "---\nlicense: psf-2.0\ntags: [llama, byte-level, code]\n---",
        f"# {Path(config.export).name}",
        f"""A decoder-only transformer of {result.num_params / 1e6:.2f} million
        parameters that writes text like {data}. It is small enough to ship with the
        project and to be served on any machine: a model to test and to show a serving
        engine with, not one to write programs with.""",
        "## Use",
        f"    jaxkv generate {Path(config.export).name} --prompt 'def '",
        f"""Tokens 0 to 255 are the bytes of UTF-8 text; token {corpora.END} ends a
        document, and stands before one too. Contexts of up to {window} tokens were
        trained.""",
        "## Shape",
        f"""Llama architecture (RMS norm, rotary positions, SwiGLU, tied embeddings):
        hidden size {model.hidden_size}, {model.num_layers} layers,
        {model.num_q_heads} query and {model.num_kv_heads} KV heads of
        {model.head_dim}, MLP {model.mlp_size}, vocabulary {model.vocab_size}.
        Weights in bfloat16.""",
        "## Data",
        f"""{data[0].upper()}{data[1:]}, without tests, code tables, generated texts and
        copies: {len(split.train)} files of {corpora.num_bytes(split.train):,} bytes to
        train on, {len(split.held_out)} files of {result.num_held_out_bytes:,} bytes
        held out. Files are held out whole, by a hash of their names;
        `scaling.corpora.held_out_files()` lists them.""",
        "## Result",
        "| | |\n|---|---|\n" + "\n".join(f"| {k} | {v:.4f} |" for k, v in rows),
        f"""Held-out files are scored in consecutive windows of {window} tokens, every
        byte and every document's end once.""",
        "## Training",
        "    jaxkv run bundled_model shipped",
        f"""{num_tokens:,} tokens ({num_tokens / num_train:.1f} epochs):
        {trunk.num_steps:,} steps of {trunk.batch_size} x {trunk.seq_len} tokens at a
        constant learning rate of {trunk.learning_rate}, then
        {config.cooldown_steps:,} steps of {config.cooldown_batch_size} x {window} while
        it falls to zero. Muon for the layers' matrices, AdamW for the rest, seed
        {trunk.seed}. It took {result.duration_s:,.0f} seconds on the clock of
        {env["num_cpus"]} cores ({env["cpu"]}) that other work shared, with Python
        {versions["python"]}, jax {versions["jax"]}, optax {versions["optax"]}.""",
        "## Licence",
        """The text is under the licence of the Python Software Foundation; the weights
        are given on the same terms.""",
    ]
    return "\n\n".join(map(_filled, parts)) + "\n"


def _filled(part: str) -> str:
    """Fills a paragraph; headings, tables and commands stay as they are."""
    if part.startswith(("-", "#", "|", "    ")):
        return part
    return textwrap.fill(" ".join(part.split()), 88, break_on_hyphens=False)
