"""Medusa: heads that each guess one token further ahead, from one hidden state.

The model's own output says which token follows the last one fed; head k, from 1 on,
says which follows k places further, without having seen those between. A head is some
residual blocks on the last hidden state, and then the model's own output matrix, so
that its weights are those of the blocks alone. All heads are asked at once: drafting
costs as much as one small product, and a tree of their best guesses is the same in
every step.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.1 (heads), 2.1.2 (trees).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxkv import validation
from jaxkv.engine.drafting import Drafter, Drafts
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import Pages, features, kv_pages
from jaxkv.models import Forward, ForwardResult, ModelConfig, Params, transformer
from jaxkv.sampling import top_k
from jaxkv.speculation import draws
from jaxkv.speculation.draft_model import Both, rows_of
from jaxkv.speculation.static_tree import Topology


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The shape of the heads."""

    target: ModelConfig
    """The model that they draft for."""
    num_heads: int = 4
    """Tokens that are guessed beyond the model's own."""
    num_blocks: int = 1
    """Residual blocks of a head."""

    def __post_init__(self) -> None:
        """Refuses counts below 1.

        Raises:
          ValueError: shows the field.
        """
        validation.settle(self)

    @property
    def taps(self) -> tuple[int, ...]:
        """What they read of the target, as `PagedForward` takes it."""
        return (self.target.num_layers,)

    def param_shapes(self, dtype: DTypeLike = "float32") -> Params:
        """The tree of the parameters, of `jax.ShapeDtypeStruct`s."""
        size = self.target.hidden_size
        lead, dtype = (self.num_heads, self.num_blocks), jnp.dtype(dtype)
        weight = jax.ShapeDtypeStruct((*lead, size, size), dtype)
        bias = jax.ShapeDtypeStruct((*lead, size), dtype)
        return {"layers": {"bias": bias, "weight": weight}}

    def init_params(self, key: Array) -> Params:
        """Zeros, by which every head says what the model itself says; no key is used.

        Source: section 2.1.1 there.
        """
        shapes = self.param_shapes()
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def logits(
    params: Params,
    target: Params,
    states: Float[Array, "rows hidden"],
    *,
    config: MedusaConfig,
) -> Float[Array, "heads rows vocab"]:
    """What every head says of every row.

    Args:
      params: of the heads.
      target: of the model.
      states: the model's last hidden states, normed.
      config: shape of the heads.

    Returns:
      Logits of the token k + 1 places behind each row's token, k from 1 on.
    """
    blocks = params["layers"]

    def head(block: Any) -> Array:
        x = states.T
        for index in range(config.num_blocks):
            grown = block["weight"][index] @ x + block["bias"][index][:, None]
            x = x + jax.nn.silu(grown)
        return x

    found = jax.vmap(head)(blocks)  # [heads, hidden, rows]
    model = transformer.merge(config.target, target)
    columns = found.transpose(1, 0, 2).reshape(found.shape[1], -1)
    return model.logits(columns).reshape(found.shape[0], states.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class WithHeads:
    """A model whose parameters have heads beside them: a `Forward` of `Both`."""

    target: Forward
    """The model, which keeps what the heads read."""

    def __call__(
        self, params: Both, pages: Pages, rows: kv_pages.Rows
    ) -> ForwardResult:
        """Feeds the rows to the model."""
        return self.target(params.target, pages, rows)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Medusa(Drafter):
    """Drafts the best guesses of all heads, laid out as a tree that is always the same.

    Its `Forward` is `WithHeads` of one with the taps of `config`.
    """

    config: MedusaConfig
    """Shape of the heads."""
    topology: Topology
    """Which guesses are drafted, those that matter most first."""

    def __post_init__(self) -> None:
        """Refuses guesses that there are not.

        Raises:
          ValueError: says which.
        """
        validation.settle(self)
        depth, num = max(self.topology.depths), self.config.num_heads
        if depth > num:
            raise ValueError(f"the tree is {depth} deep, there are {num} heads")
        rank, vocab = max(self.topology.ranks), self.config.target.vocab_size
        if rank >= vocab:
            raise ValueError(f"{rank=} must be below vocab_size={vocab}")

    @property
    def width(self) -> int:
        """Children that a node of the tree has at most."""
        return self.topology.width

    def wishes(
        self, memory: Any, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """The whole tree."""
        num = min(config.max_drafts, len(self.topology.ranks))
        return jnp.full(state.slots.sequence.shape, num, jnp.int32)

    def propose(
        self,
        params: Both,
        memory: Any,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[Any, Pages, Drafts]:
        """Asks the heads of the token that was fed last."""
        row = jnp.maximum(state.slots.sequence, 0)
        known = state.sequences.num_tokens[row]
        fed = jnp.where(granted > 0, known - 2, -1)
        rows = rows_of(state, state.sequences.tokens[row], fed)
        states = features.read_features(state.pages, rows, fed)
        said = logits(params.draft, params.target, states, config=self.config)
        num = min(config.max_drafts, len(self.topology.ranks))
        tree = Topology(self.topology.parents[:num], self.topology.ranks[:num])
        # The guesses of each head, the best first: [heads, slots, guesses].
        heads, slots, vocab = said.shape
        ahead = jnp.arange(heads, dtype=jnp.int32)[:, None]
        positions = (known[None, :] + ahead).reshape(-1)
        asked = jax.tree.map(lambda x: x[jnp.tile(row, heads)], state.sequences.params)
        ranked = draws.coupled(said.reshape(-1, vocab), asked, positions)
        _, best = top_k.candidates(ranked, 1 + max(tree.ranks))
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
