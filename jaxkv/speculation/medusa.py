"""Medusa: heads that each guess one token further ahead, from one hidden state.

The model's own output predicts the token after the last one fed; head k, from 1 on,
predicts the token k positions further, without the tokens between. A head is a stack of
residual blocks on the last hidden state, followed by the model's output matrix, so that
its weights are those of the blocks. All heads run at once: drafting costs one small
product. The tree of their best guesses is the same in every step.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.1 (heads), 2.1.2 (trees).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PyTree

from jaxkv import models, validation
from jaxkv.engine import Drafter, DrafterMemory, Drafts, EngineConfig, EngineState
from jaxkv.memory import Pages, Rows, read_features
from jaxkv.models import Forward, ForwardResult, ModelConfig, Params
from jaxkv.sampling import candidates
from jaxkv.speculation import draws
from jaxkv.speculation.draft_model import TargetAndDraftParams, make_slot_rows
from jaxkv.speculation.static_tree import Topology


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Shape of the heads."""

    target: ModelConfig
    """Shape of the target model."""
    num_heads: int = 4
    """Number of heads: tokens guessed beyond the model's own prediction."""
    num_blocks: int = 1
    """Residual blocks per head."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a count is below 1; the message shows it.
        """
        validation.check_fields(self)

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states that the heads read, see `PagedForward`."""
        return (self.target.num_layers,)

    def param_shapes(self, dtype: DTypeLike = "float32") -> Params:
        """Returns the parameter tree as `jax.ShapeDtypeStruct`s."""
        size = self.target.hidden_size
        lead = (self.num_heads, self.num_blocks)
        dtype = jnp.dtype(dtype)
        weight = jax.ShapeDtypeStruct((*lead, size, size), dtype)
        bias = jax.ShapeDtypeStruct((*lead, size), dtype)
        return {"layers": {"bias": bias, "weight": weight}}

    def init_params(self, key: Array) -> Params:
        """Returns zeros: every head predicts the model's own output; `key` is unused.

        Source: section 2.1.1 of the paper.
        """
        shapes = self.param_shapes()
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def head_logits(
    params: Params,
    target: Params,
    states: Float[Array, "rows hidden"],
    *,
    config: MedusaConfig,
) -> Float[Array, "heads rows vocab"]:
    """Computes the logits of every head for every row.

    Args:
      params: parameters of the heads.
      target: parameters of the target.
      states: the target's last hidden states, normalised.
      config: shape of the heads.

    Returns:
      Logits of the token k + 1 positions after each row's token, for k from 1 on.
    """
    blocks = params["layers"]

    def head(block: PyTree[Array]) -> Array:
        x = states.T
        for index in range(config.num_blocks):
            y = block["weight"][index] @ x + block["bias"][index][:, None]
            x = x + jax.nn.silu(y)
        return x

    states_by_head = jax.vmap(head)(blocks)  # [heads, hidden, rows]
    model = models.merge(config.target, target)
    columns = states_by_head.transpose(1, 0, 2).reshape(states_by_head.shape[1], -1)
    return model.logits(columns).reshape(states_by_head.shape[0], states.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class TargetWithHeads:
    """A target that has Medusa heads: a `Forward` of `TargetAndDraftParams`."""

    target: Forward
    """Forward pass of the target, which keeps the states that the heads read."""

    def __call__(
        self, params: TargetAndDraftParams, pages: Pages, rows: Rows
    ) -> ForwardResult:
        """Runs the target on the rows."""
        return self.target(params.target, pages, rows)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Medusa(Drafter):
    """Drafts the best guesses of all heads as a static tree.

    The engine's `Forward` must be a `TargetWithHeads` with the taps of `config`.
    """

    config: MedusaConfig
    """Shape of the heads."""
    topology: Topology
    """Tree of the drafted guesses, the most valuable nodes first."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: the tree is deeper than there are heads, or has a rank beyond the
            vocabulary.
        """
        validation.check_fields(self)
        depth = max(self.topology.depths)
        num = self.config.num_heads
        if depth > num:
            raise ValueError(f"the tree is {depth} deep, there are {num} heads")
        rank = max(self.topology.ranks)
        vocab = self.config.target.vocab_size
        if rank >= vocab:
            raise ValueError(f"{rank=} must be below vocab_size={vocab}")

    @property
    def width(self) -> int:
        """Largest number of children of a node."""
        return self.topology.width

    def requested_draft_lengths(
        self, memory: DrafterMemory, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """Returns the size of the tree."""
        num = min(config.max_drafts, len(self.topology.ranks))
        return jnp.full(state.slots.sequence.shape, num, jnp.int32)

    def propose(
        self,
        params: TargetAndDraftParams,
        memory: DrafterMemory,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[DrafterMemory, Pages, Drafts]:
        """Runs the heads on the last fed token's state, and packs the tree."""
        row = jnp.maximum(state.slots.sequence, 0)
        num_tokens = state.slots.num_tokens
        fed = jnp.where(granted > 0, num_tokens - 2, -1)
        rows = make_slot_rows(state, state.sequences.tokens[row], fed)
        states = read_features(state.pages, rows, fed)
        logits = head_logits(params.draft, params.target, states, config=self.config)
        num = min(config.max_drafts, len(self.topology.ranks))
        tree = Topology(self.topology.parents[:num], self.topology.ranks[:num])
        # Guesses of each head, the best first: [heads, slots, guesses].
        heads, slots, vocab = logits.shape
        ahead = jnp.arange(heads, dtype=jnp.int32)[:, None]
        positions = (num_tokens[None, :] + ahead).reshape(-1)
        sampling = jax.tree.map(
            lambda x: x[jnp.tile(row, heads)], state.sequences.params
        )
        ranked = draws.shared_noise_logits(
            logits.reshape(-1, vocab), sampling, positions
        )
        _, best = candidates(ranked, 1 + max(tree.ranks))
        best = best.reshape(heads, slots, -1)
        depths, ranks = (jnp.asarray(x) for x in (tree.depths, tree.ranks))
        tokens = best[depths - 1, :, ranks].T
        blank = ((0, 0), (0, config.max_drafts - num))
        parents = None
        if tree.parents != (*range(num),):
            parents = jnp.asarray(tree.parents, jnp.int32)[None, :]
            parents = jnp.pad(jnp.broadcast_to(parents, tokens.shape), blank)
        drafts = Drafts(
            num=jnp.minimum(granted, num),
            tokens=jnp.pad(tokens, blank),
            parents=parents,
        )
        return memory, state.pages, drafts
