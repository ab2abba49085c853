"""Models for measurements: real models, and real shapes with random weights."""

from typing import Any, Literal

import jax

from jaxkv import files
from jaxkv.engine import EngineConfig, EngineParts, EngineRules
from jaxkv.models import (
    LoadedModel,
    ModelConfig,
    PagedForward,
    init_params,
    load_model,
    make_model_pages,
)
from jaxkv.scheduling import Policy, fcfs
from jaxkv.serving import Engine
from jaxkv.validation import format_unknown_name

RANDOM_SHAPES = {
    "random-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_size=1536,
        max_positions=8192,
        rope_theta=100_000.0,
    ),
    "random-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=14336,
        max_positions=8192,
        rope_theta=500_000.0,
        tie_embeddings=False,
    ),
    "random-tiny": ModelConfig(
        vocab_size=257,
        hidden_size=32,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_size=64,
        max_positions=1024,
    ),
}
"""Shapes that are served with random weights: speed does not depend on the values."""


def load_benchmark_model(
    model: str, dtype: Literal["float32", "bfloat16"]
) -> LoadedModel:
    """Loads a model, or initializes one with random weights.

    Args:
      model: a folder, the name of a bundled model, or a key of `RANDOM_SHAPES`.
      dtype: type of the weights.

    Raises:
      ValueError: the model does not exist, or its folder cannot be read.
    """
    if model in RANDOM_SHAPES:
        shape = RANDOM_SHAPES[model]
        params = init_params(shape, jax.random.key(0), dtype=dtype)
        return LoadedModel(shape, params, None, ())
    try:
        folder = files.model_folder(model)
    except ValueError:
        line = format_unknown_name(
            "model", model, [*files.bundled_models(), *RANDOM_SHAPES]
        )
        raise ValueError(f"{line} (or the path of a folder)") from None
    return load_model(folder, dtype=dtype)


def load_text_model(model: str, *, max_length: int) -> LoadedModel:
    """Loads a model that has a tokenizer and positions for `max_length` tokens.

    Raises:
      ValueError: the model does not exist, cannot be read, has no tokenizer, or has too
        few positions.
    """
    loaded = load_model(files.model_folder(model))
    if loaded.tokenizer is None:
        raise ValueError(f"{model}: has no tokenizer, so no text")
    if max_length > loaded.config.max_positions:
        raise ValueError(
            f"{max_length=} must be at most {loaded.config.max_positions=}"
        )
    return loaded


def make_benchmark_config(
    batch: int, max_length: int, *, page_size: int = 16, **more: Any
) -> EngineConfig:
    """Returns an engine config with slots, pages and queue places for a whole batch.

    Args:
      batch: number of sequences.
      max_length: tokens of a sequence.
      page_size: tokens per page.
      more: further fields of `EngineConfig`, or replacements.
    """
    size_names = ("max_slots", "max_sequences", "queue_capacity", "submit_width")
    fields: dict[str, Any] = dict.fromkeys(size_names, batch)
    fields |= {"num_pages": batch * -(-max_length // page_size)} | more
    return EngineConfig(page_size=page_size, max_length=max_length, **fields)


def make_engine(
    model: LoadedModel,
    bounds: EngineConfig,
    *,
    has_text: bool = True,
    policy: Policy | None = None,
    host_pages: int | None = None,
) -> Engine:
    """Makes an engine that keeps its trace.

    Args:
      model: loaded model.
      bounds: engine config.
      has_text: False disables detokenization, which takes time.
      policy: scheduling policy; None means `fcfs()`.
      host_pages: swap space, see `Engine`.
    """
    parts = EngineParts(
        model.params,
        PagedForward(model.config, bounds.numerics),
        make_model_pages(model.config, bounds),
        bounds,
        tokenizer=model.tokenizer if has_text else None,
        eos_ids=model.eos_ids,
        vocab_size=model.config.vocab_size,
    )
    rules = EngineRules(policy=fcfs() if policy is None else policy)
    return Engine(parts, rules, host_pages=host_pages, keep_trace=True)
