"""EAGLE and multi-token prediction: layers on the target's hidden states that draft.

An input row is a token and the feature of the token before it: hidden states of several
target layers, fused to one state. One transformer layer with K and V of its own maps
both to a new state, and the target's output matrix maps that to logits of the next
token. Drafts have no target features yet; the drafter's own states take their place, as
in training.

The modules of multi-token prediction (MTP) are part of the target's parameters. A
module differs from an EAGLE drafter in the input of its layer, which has no residual,
and in the state, which is the target's last one.

Source: Li et al. 2025, arXiv:2503.01840 (EAGLE-3), section 3.1 and figures 5 and 6; Li
et al. 2024, arXiv:2401.15077 (EAGLE), section 3.1; DeepSeek-V3, arXiv:2412.19437,
section 2.2.
"""

import dataclasses
import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jaxkv import models, validation
from jaxkv.memory import Pages, Rows
from jaxkv.models import (
    BY_COLUMNS,
    SHARED_PARAMS,
    Angles,
    LayerAttention,
    ModelConfig,
    PagedForward,
    Params,
    Transformer,
    divide_rows,
    embed_tokens,
    merge_ahead,
    multiply,
    split_and_rotate,
)


class DraftLayerOutput(NamedTuple):
    """Result of one drafting layer for the rows of a pass."""

    states: Float[Array, "rows hidden"]
    """New state of each row, after the final norm."""
    model: Transformer
    """A model whose output head maps states to logits of the next token."""
    pages: Pages
    """The drafter's pages, with K and V of the rows."""


@runtime_checkable
class DraftLayers(Protocol):
    """Shape of layers that draft: an `EagleConfig` or an `MTPConfig`; hashable."""

    @property
    def target(self) -> ModelConfig:
        """Shape of the target model."""
        ...

    @property
    def layer(self) -> ModelConfig:
        """Shape of a model with the drafting layers."""
        ...

    @property
    def num_modules(self) -> int:
        """Number of drafting layers."""
        ...

    def first_states(
        self, params: Params, features: Float[Array, "rows features"]
    ) -> Float[Array, "rows hidden"]:
        """Returns the states that the first layer reads, from the target's features."""
        ...

    def run_module(
        self,
        index: int,
        params: Params,
        target: Params,
        pages: Pages,
        rows: Rows,
        before: Float[Array, "own hidden"],
    ) -> DraftLayerOutput:
        """Runs a layer on rows over the drafter's pages.

        Args:
          index: number of the layer, from 0 on.
          params: parameters of the drafter.
          target: parameters of the target.
          pages: pages of the drafter, with K and V for each layer.
          rows: the packed rows.
          before: state of the token before each row's, of the rows that
            `row_parts.divide_rows` assigns to this device.

        Returns:
          States of the same rows, the model of the layer, and the pages.
        """
        ...


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Shape of an EAGLE drafter."""

    target: ModelConfig
    """Shape of the target model; the drafter's layer has the same shape."""
    taps: tuple[int, ...]
    """Indices of the hidden states that are fused, see `PagedForward`."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: `taps` is empty, or has an index that the target does not have.
        """
        validation.check_fields(self)
        num_layers = self.target.num_layers
        if not self.taps or not all(0 <= tap <= num_layers for tap in self.taps):
            raise ValueError(f"taps={self.taps!r} must be some in [0, {num_layers}]")

    @property
    def num_modules(self) -> int:
        """One: the layer reads its own states."""
        return 1

    @property
    def layer(self) -> ModelConfig:
        """Shape of a model with the drafter's single layer."""
        target = self.target
        kinds = target.attention_kinds
        if target.has_special_layers or not all(x.has_attention for x in kinds):
            target = dataclasses.replace(
                target,
                recurrence=None,
                other_attention=(),
                attention_pattern=(0,),
                residual="serial",
                experts=None,
                keys_are_values=False,
                layer_input_size=0,
                layer_scale=False,
            )
        return dataclasses.replace(
            target, num_layers=1, num_ahead_layers=0, experts=None
        )

    def param_shapes(self, dtype: DTypeLike = "float32") -> Params:
        """Returns the parameter tree as `jax.ShapeDtypeStruct`s."""
        size = self.target.hidden_size
        dtype = jnp.dtype(dtype)
        shapes = models.param_shapes(self.layer, dtype=dtype)

        def shape(*sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        return {name: shapes[name] for name in shapes if name not in SHARED_PARAMS} | {
            "feature_norm": {"scale": shape(size)},
            "fuse": {"weight": shape(size, len(self.taps) * size)},
            "merge": {"weight": shape(size, 2 * size)},
            "token_norm": {"scale": shape(size)},
        }

    def init_params(self, key: Array) -> Params:
        """Returns random weights; the fused feature starts as the mean of the taps."""
        keys = jax.random.split(key)
        params = models.init_params(self.layer, keys[0])
        params = {name: params[name] for name in params if name not in SHARED_PARAMS}
        size = self.target.hidden_size
        num = len(self.taps)
        draw = jax.random.normal(keys[1], (size, 2 * size)) * jnp.float32(0.02)
        mean = jnp.tile(jnp.eye(size) / jnp.float32(num), (1, num))
        return params | {
            "feature_norm": {"scale": jnp.ones(size)},
            "fuse": {"weight": mean},
            "merge": {"weight": draw},
            "token_norm": {"scale": jnp.ones(size)},
        }

    def first_states(
        self, params: Params, features: Float[Array, "rows features"]
    ) -> Float[Array, "rows hidden"]:
        """Fuses the features, see `fuse_features`."""
        return fuse_features(params, features)

    def run_module(
        self,
        index: int,
        params: Params,
        target: Params,
        pages: Pages,
        rows: Rows,
        before: Float[Array, "own hidden"],
    ) -> DraftLayerOutput:
        """Runs the layer, as defined by `DraftLayers.run_module`."""
        del index
        token = divide_rows(rows).shard(rows.token)
        x = make_layer_inputs(params, target, token, before, config=self)
        model = make_draft_transformer(params, target, self)
        states = PagedForward(self.layer).states(model, pages, rows, x)
        return DraftLayerOutput(states.last.T, model, states.carry)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Shape of a drafter made of the target's modules for multi-token prediction.

    Its parameters are `params["ahead"]` of the target.
    """

    target: ModelConfig
    """Shape of the target model."""

    def __post_init__(self) -> None:
        """Validates the target.

        Raises:
          ValueError: the target has no modules.
        """
        validation.check_fields(self)
        if (num := self.target.num_ahead_layers) < 1:
            raise ValueError(
                f"target.num_ahead_layers={num} must be at least 1, the number of "
                "modules for multi-token prediction"
            )

    @property
    def num_modules(self) -> int:
        """Number of the target's modules."""
        return self.target.num_ahead_layers

    @property
    def taps(self) -> tuple[int, ...]:
        """Index of the target's last hidden state, after its norm."""
        return (self.target.num_layers,)

    @property
    def layer(self) -> ModelConfig:
        """Shape of a model with the layers of all modules."""
        return self.target.ahead_config

    def first_states(
        self, params: Params, features: Float[Array, "rows hidden"]
    ) -> Float[Array, "rows hidden"]:
        """Returns the features, the target's last states."""
        del params
        return features

    def run_module(
        self,
        index: int,
        params: Params,
        target: Params,
        pages: Pages,
        rows: Rows,
        before: Float[Array, "own hidden"],
    ) -> DraftLayerOutput:
        """Runs the layer of a module, as defined by `DraftLayers.run_module`."""
        params_of_model = {**target, "ahead": params}
        module, model = merge_ahead(self.target, params_of_model, index)
        token = divide_rows(rows).shard(rows.token)
        columns = BY_COLUMNS
        num_words = self.target.vocab_size
        embeddings = columns.embed(model.embed.weight[...], token, num_words)
        x = module.inputs(embeddings, before.T, columns)
        forward = PagedForward(self.layer, layers=(index,))
        ran = forward.states(model, pages, rows, x)
        return DraftLayerOutput(ran.last.T, model, ran.carry)


def make_draft_transformer(
    params: Params, target: Params, config: EagleConfig
) -> Transformer:
    """Combines the drafter's layer and norm with the target's embeddings and head."""
    params_of_layer = {name: params[name] for name in ("layers", "final_norm")}
    shared = {name: target[name] for name in SHARED_PARAMS if name in target}
    return models.merge(config.layer, params_of_layer | shared)


def fuse_features(
    params: Params, features: Float[Array, "rows features"]
) -> Float[Array, "rows hidden"]:
    """Maps tapped features to one state per row; absent features are zeros."""
    # With the weights first: of few rows on the left CPUs multiply 50 times as slowly.
    return multiply(params["fuse"]["weight"], features.T).T


def make_layer_inputs(
    params: Params,
    target: Params,
    tokens: Int[Array, " rows"],
    states: Float[Array, "rows hidden"],
    *,
    config: EagleConfig,
) -> Float[Array, "hidden rows"]:
    """Computes the input columns of the drafter's layer.

    Args:
      params: parameters of the drafter.
      target: parameters of the target.
      tokens: one per row.
      states: state of the token before each row's: a fused feature, or the drafter's
        own state.
      config: shape of the drafter.

    Returns:
      Columns: the states plus a projection of normalised tokens and states.
    """
    norm = functools.partial(models.norm, kind="rms", eps=config.target.norm_eps)
    table = target["embed"]["weight"]
    num_words = config.target.vocab_size
    embeddings = embed_tokens(table, tokens, num_words)
    token = norm(embeddings, **params["token_norm"])
    feature = norm(states, **params["feature_norm"])
    both = jnp.concatenate([token, feature], axis=1)
    return states.T + multiply(params["merge"]["weight"], both.T)


@validation.checks_numbers()
def unroll_drafts(
    params: Params,
    target: Params,
    tokens: Int[Array, "batch seq"],
    features: Float[Array, "batch seq features"],
    *,
    config: EagleConfig,
    num_steps: int,
) -> Float[Array, "num_steps batch seq vocab"]:
    """Drafts from every position of whole sequences at once, as in training.

    The text itself takes the place of sampled drafts. In step s, the last s tokens
    before each position count as drafts: the input state is the output of step s - 1,
    keys of earlier tokens are computed from target features, and keys of the drafts
    from the states of the step that drafted them.

    Args:
      params: parameters of the drafter.
      target: parameters of the target.
      tokens: the texts.
      features: the target's features of the same tokens.
      config: shape of the drafter.
      num_steps: at least 1, static.

    Returns:
      Logits of the token after each position. Those of step s are undefined at the
      first s positions.

    Source: EAGLE-3, section 3.2, "training-time test".
    """
    batch, seq = tokens.shape
    model = make_draft_transformer(params, target, config)
    positions = jnp.tile(jnp.arange(seq, dtype=jnp.int32), batch)
    states = fuse_features(params, features.reshape(batch * seq, -1))
    keys: tuple[tuple[Array, Array], ...] = ()
    logits = []
    for _ in range(num_steps):
        before = states.reshape(batch, seq, -1)[:, :-1]
        before = jnp.pad(before, ((0, 0), (1, 0), (0, 0))).reshape(batch * seq, -1)
        x = make_layer_inputs(params, target, tokens.reshape(-1), before, config=config)
        attend = functools.partial(_attend, shape=(batch, seq))
        run = model.hidden(tokens.reshape(-1), positions, attend, keys, inputs=x)
        states = run.last.T
        keys = run.carry
        logits.append(model.logits(run.last).reshape(batch, seq, -1))
    return jnp.stack(logits)


def _attend(
    layer: LayerAttention,
    qkv: PyTree[Array],
    angles: Angles | None,
    keys: tuple[tuple[Array, Array], ...],
    *,
    shape: tuple[int, int],
) -> tuple[
    Float[Array, "kv_heads group value_dim rows"], tuple[tuple[Array, Array], ...]
]:
    """Attends as a step of `unroll_drafts`; `keys` are K and V of earlier steps."""
    (batch, seq), step = shape, len(keys)
    q, k, v = (
        x.reshape(*x.shape[:-1], batch, seq) for x in split_and_rotate(qkv, angles)
    )
    keys = (*keys, (k, v))
    place = jnp.arange(seq, dtype=jnp.int32)
    back = place[:, None] - place[None, :]
    window = layer.kind.window or seq
    is_visible = (back >= step) & (back < window)
    scores = jnp.einsum("kgdbq,kdbs->kgbqs", q, keys[0][0])
    scores = [jnp.where(is_visible, scores, -jnp.inf)]
    # Of the drafts each step has one, `age` tokens ago.
    aged = [(step - offset, keys[offset]) for offset in range(1, step + 1)]
    aged = [(age, pair) for age, pair in aged if age < window]
    for age, (key, _) in aged:
        one = jnp.einsum("kgdbq,kdbq->kgbq", q, jnp.roll(key, age, axis=-1))
        scores.append(one[..., None])
    scale = jnp.asarray(layer.scoring.scale, q.dtype)
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * scale, axis=-1)
    out = jnp.einsum("kgbqs,kdbs->kgdbq", weights[..., :seq], keys[0][1])
    for index, (age, (_, value)) in enumerate(aged):
        weight = weights[:, :, None, :, :, seq + index]
        out = out + weight * jnp.roll(value, age, axis=-1)[:, None]
    return out.reshape(*out.shape[:3], -1), keys
