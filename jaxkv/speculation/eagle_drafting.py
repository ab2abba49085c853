"""Drafting with EAGLE or MTP: grows a token tree and drafts its most likely nodes.

The drafter's layer runs over every row that the target reads, with the feature of the
token before it, so its K and V exist wherever the target's do: through sharing, prefix
cache, swap and preemption. To draft, it feeds the last known token, then the most
likely guesses of each depth, with the state of the parent in place of a feature; their
K and V are written to places that verification overwrites. Finally the nodes with the
highest joint probability are drafted. A node is never more likely than its parent, so
these form a tree.

With several modules for multi-token prediction, module k drafts the k-th token, and the
last one all further tokens. The state of module k - 1 of every token is kept on the
drafter's pages, since module k reads that of the token before. While drafting, a token
of depth d is fed to module d + 1 for its guesses, and to the modules after it for their
K and V.

Source: Li et al. 2024, arXiv:2406.16858 (EAGLE-2), section 4; Li et al. 2025,
arXiv:2503.01840 (EAGLE-3); DeepSeek-V3, arXiv:2412.19437, section 2.2.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, validation
from jaxkv.engine import Drafter, DrafterMemory, Drafts, EngineConfig, EngineState
from jaxkv.memory import Pages, Rows, parent_places, read_features, write_features
from jaxkv.models import Forward, ForwardResult, divide_rows
from jaxkv.sampling import candidates
from jaxkv.speculation import draws, static_tree
from jaxkv.speculation.draft_model import TargetAndDraftParams, make_slot_rows
from jaxkv.speculation.eagle import DraftLayers


@dataclasses.dataclass(frozen=True)
class TargetWithEagle:
    """A target and its EAGLE or MTP drafter: a `Forward` of `TargetAndDraftParams`."""

    target: Forward
    """Forward pass of the target, which keeps the taps of `config`."""
    config: DraftLayers
    """Shape of the drafter."""

    def __call__(
        self, params: TargetAndDraftParams, pages: Pages, rows: Rows
    ) -> ForwardResult:
        """Runs both models on the rows; returns the logits of the target."""
        assert pages.draft_pages is not None
        result = self.target(params.target, pages._replace(draft_pages=None), rows)
        parents = parent_places(rows)
        parts = divide_rows(rows)
        features = read_features(result.pages, rows, parents)
        before = self.config.first_states(params.draft, parts.shard(features.T).T)
        draft_pages = pages.draft_pages
        states = []
        for index in range(self.config.num_modules):
            ran = self.config.run_module(
                index, params.draft, params.target, draft_pages, rows, before
            )
            draft_pages = ran.pages
            if index == self.config.num_modules - 1:
                break
            # States of later modules are not known yet, nor read before they are.
            states.append(parts.gather(ran.states.T).T)
            blank = [jnp.zeros_like(states[0])] * (self.config.num_modules - 2 - index)
            draft_pages = write_features(
                draft_pages, jnp.concatenate([*states, *blank], axis=1), rows
            )
            features = read_features(draft_pages, rows, parents)
            size = before.shape[1]
            before = parts.shard(features[:, index * size : (index + 1) * size].T).T
        return result._replace(pages=result.pages._replace(draft_pages=draft_pages))


class _Nodes(NamedTuple):
    """Guesses of one depth, `n` for each slot, contiguous by slot."""

    token: Int32[Array, "slots n"]
    score: Float[Array, "slots n"]
    """Log-probability of the path to each guess; any finite number in a chain, where
    paths do not compete; -inf where there is no guess."""
    parent: Int32[Array, "slots n"]
    """Index of the parent among all guesses, from 1 on; 0 is the root."""
    state: Float[Array, "slots n states"]
    """States of the parent, of each module that it was fed to."""
    ancestors: Bool[Array, "slots n columns"]
    """True for fed guesses on the path to the parent, the parent included."""


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Eagle(Drafter):
    """Drafts the most likely guesses of an EAGLE or MTP drafter.

    The engine's `Forward` must be a `TargetWithEagle`.
    """

    config: DraftLayers
    """Shape of the drafter."""
    beams: tuple[int, ...] = ()
    """Guesses that are expanded at each depth, from 1 on; the tree is one deeper than
    this tuple is long. Each expanded guess occupies a draft's place for its K and V, so
    their sum must be at most `EngineConfig.max_drafts`. Empty for a tree of depth 1."""
    branching: int = 1
    """Children of each expanded node."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a number is below 1, or `beams` exceeds the guesses of a depth.
        """
        validation.check_fields(self)
        max_beam = 1
        for beam in self.beams:
            max_beam *= self.branching
            if not 1 <= beam <= max_beam:
                raise ValueError(
                    f"beams={self.beams!r} must be in [1, {max_beam}] there"
                )
            max_beam = beam

    @property
    def width(self) -> int:
        """Children of each expanded node."""
        return self.branching

    def propose(
        self,
        params: TargetAndDraftParams,
        memory: DrafterMemory,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[DrafterMemory, Pages, Drafts]:
        """Feeds the last known token, then the most likely guesses by depth."""
        if sum(self.beams) > config.max_drafts:
            raise ValueError(
                f"sum of beams={self.beams!r} must be at most {config.max_drafts=}"
            )
        row = jnp.maximum(state.slots.sequence, 0)
        root = jnp.where(granted > 0, state.slots.num_tokens - 1, -1)
        draft_pages = state.pages.draft_pages
        assert draft_pages is not None
        step = _DraftingStep(self, params, state, row, root, granted)
        nodes, draft_pages = step.feed_root(draft_pages)
        levels = [nodes]
        start = 0
        offset = 0
        for depth, beam in enumerate(self.beams, 1):
            chosen, index = _top_guesses(nodes, beam)
            name = start + 1 + index
            start = start + nodes.token.shape[1]
            nodes, draft_pages = step.feed_guesses(
                draft_pages, chosen, name, offset, depth
            )
            levels.append(nodes)
            offset += beam
        choose = _pack_chain if self.branching == 1 else _pack_tree
        drafts = choose(levels, granted, config.max_drafts)
        return memory, state.pages._replace(draft_pages=draft_pages), drafts


def build_eagle_drafter(
    config: DraftLayers, acceptance: Sequence[Sequence[float]], num: int
) -> Eagle:
    """Builds a drafter of `num` drafts from measured acceptance rates.

    The beam at each depth is the number of inner nodes at that depth in the best static
    tree of `num` nodes. Depths beyond those of `acceptance` have the rates of the last
    one.

    Args:
      config: shape of the drafter.
      acceptance: probability that a guess is right, by depth and rank.
      num: drafts of a step.
    """
    further = [*acceptance, *[acceptance[-1]] * max(0, num - len(acceptance))]
    tree = static_tree.build(further, num)
    depths = (0, *tree.depths)
    inner = [depths[parent] for parent in {*tree.parents} if parent]
    beams = tuple(inner.count(depth) for depth in range(1, max(depths)))
    return Eagle(config, beams, tree.width)


class _DraftingStep(NamedTuple):
    """Inputs that are constant while one step is drafted."""

    drafter: Eagle
    params: TargetAndDraftParams
    state: EngineState
    row: Int32[Array, " slots"]
    """Row of each slot in `Sequences`."""
    root: Int32[Array, " slots"]
    """Position of the last known token; -1 for slots without drafts."""
    granted: Int32[Array, " slots"]

    def feed_root(self, draft_pages: Pages) -> tuple[_Nodes, Pages]:
        """Feeds the last known token of every slot."""
        rows = make_slot_rows(
            self.state, self.state.sequences.tokens[self.row], self.root
        )
        features = read_features(self.state.pages, rows, self.root - 1)
        config = self.drafter.config
        before = config.first_states(self.params.draft, features)
        if config.num_modules > 1:
            states = read_features(draft_pages, rows, self.root - 1)
            before = jnp.concatenate([before, states], axis=1)
        has_root = (self.root >= 0)[:, None]
        columns = jnp.zeros((*has_root.shape, sum(self.drafter.beams)), bool)
        score = jnp.where(has_root, 0.0, -jnp.inf).astype(jnp.float32)
        return self._feed_rows(
            draft_pages, rows, before, score, jnp.zeros_like(rows.token), columns
        )

    def feed_guesses(
        self,
        draft_pages: Pages,
        chosen: _Nodes,
        name: Int32[Array, "slots n"],
        offset: int,
        depth: int,
    ) -> tuple[_Nodes, Pages]:
        """Feeds guesses of a depth; returns their children.

        Args:
          draft_pages: pages of the drafter.
          chosen: the guesses.
          name: index of each among all guesses, as in `_Nodes.parent`.
          offset: draft places used by shallower guesses.
          depth: of the guesses, from 1 on.
        """
        num = chosen.token.shape[1]
        column = offset + jnp.arange(num, dtype=jnp.int32)[None, :]
        is_node = (column < self.granted[:, None]) & (chosen.score > -jnp.inf)
        root = self.root[:, None]
        place = jnp.where(is_node, root + 1 + column, -1)
        every = jnp.arange(chosen.ancestors.shape[2], dtype=jnp.int32)
        ancestors = chosen.ancestors | (every[None, None, :] == column[:, :, None])
        rows = Rows(
            token=chosen.token.reshape(-1),
            position=jnp.where(is_node, root + depth, -1).reshape(-1),
            slot=None,
            page_ids=self.state.table.page_ids,
            logit_rows=jnp.arange(place.size, dtype=jnp.int32),
        )
        if self.drafter.branching > 1:
            rows = rows._replace(  # tree attention
                place=place.reshape(-1),
                context=jnp.where(self.root >= 0, self.root + 1, -1),
                ancestors=ancestors.reshape(-1, ancestors.shape[2]),
            )
        score = jnp.where(is_node, chosen.score, -jnp.inf)
        config = self.drafter.config
        num_states = max(config.num_modules - depth, 1) * config.target.hidden_size
        states = chosen.state[:, :, :num_states].reshape(-1, num_states)
        return self._feed_rows(
            draft_pages, rows, states, score, name.reshape(-1), ancestors
        )

    def _feed_rows(
        self,
        draft_pages: Pages,
        rows: Rows,
        before: Float[Array, "rows states"],
        score: Float[Array, "slots n"],
        name: Int32[Array, " rows"],
        ancestors: Bool[Array, "slots n columns"],
    ) -> tuple[_Nodes, Pages]:
        """Runs the layers if any row is valid; returns the guesses of every row.

        `before` has a state for each of the last modules; the first of them makes the
        guesses.
        """
        config = self.drafter.config
        width = self.drafter.branching
        num_slots, num = score.shape
        draft = self.params.draft
        target = self.params.target

        def spread(x: Array) -> Array:
            return jnp.repeat(x.reshape(num_slots, num, -1), width, axis=1)

        def run(carry: tuple[_Nodes, Pages], rows: Rows, before: Array) -> Any:
            nodes, draft_pages = carry
            parts = jnp.split(before, before.shape[1] // config.target.hidden_size, 1)
            ran = []
            for index, part in enumerate(parts, config.num_modules - len(parts)):
                module_pass = config.run_module(
                    index, draft, target, draft_pages, rows, part
                )
                ran.append(module_pass)
                draft_pages = module_pass.pages
            sampling = jax.tree.map(
                lambda x: jnp.repeat(x[self.row], num, axis=0),
                self.state.sequences.params,
            )
            logits = ran[0].model.logits(ran[0].states.T)
            ranked = draws.shared_noise_logits(logits, sampling, rows.position + 1)
            # Scores of chains are never compared.
            scores = ranked if width == 1 else jax.nn.log_softmax(ranked)
            values, token = candidates(scores, width)
            values = values.reshape(num_slots, -1).astype(nodes.score.dtype)
            nodes = nodes._replace(
                token=token.reshape(num_slots, -1),
                score=nodes.score + values,
                state=spread(jnp.concatenate([x.states for x in ran], axis=1)),
            )
            return nodes, draft_pages

        total = spread(score)[:, :, 0]
        nodes = _Nodes(
            token=jnp.zeros(total.shape, jnp.int32),
            score=total,
            parent=spread(name)[:, :, 0],
            state=spread(jnp.zeros_like(before)),
            ancestors=spread(ancestors),
        )
        has_rows = jnp.any(rows.position >= 0)
        return arrays.update_if(has_rows, run, (nodes, draft_pages), rows, before)


def _top_guesses(nodes: _Nodes, num: int) -> tuple[_Nodes, Int32[Array, "slots {num}"]]:
    """Returns the most likely guesses of a depth and their indices."""
    if nodes.token.shape[1] == 1:
        return nodes, jnp.zeros_like(nodes.token)
    _, index = lax.top_k(nodes.score, num)

    def pick(x: Array) -> Array:
        at = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, at, axis=1)

    return jax.tree.map(pick, nodes), index.astype(jnp.int32)


def _pack_chain(
    levels: list[_Nodes], granted: Int32[Array, " slots"], max_drafts: int
) -> Drafts:
    """Drafts the single guess of each depth."""
    token = jnp.concatenate([nodes.token for nodes in levels], axis=1)[:, :max_drafts]
    num = token.shape[1]
    blank = ((0, 0), (0, max_drafts - num))
    return Drafts(num=jnp.minimum(granted, num), tokens=jnp.pad(token, blank))


def _pack_tree(
    levels: list[_Nodes], granted: Int32[Array, " slots"], max_drafts: int
) -> Drafts:
    """Drafts the most likely guesses of all depths.

    A guess is never more likely than its parent, which precedes it among ties.
    """
    token, score, parent = (
        jnp.concatenate([getattr(nodes, name) for nodes in levels], axis=1)
        for name in ("token", "score", "parent")
    )
    num = min(max_drafts, token.shape[1])
    best, order = lax.top_k(score, num)
    slot = jnp.arange(token.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.arange(1, num + 1, dtype=jnp.int32)[None, :]
    place = jnp.zeros((token.shape[0], token.shape[1] + 1), jnp.int32)
    named = jnp.broadcast_to(index, order.shape)
    place = arrays.put(place, (slot, order.astype(jnp.int32) + 1), named)
    num_nodes = jnp.sum(best > -jnp.inf, axis=1, dtype=jnp.int32)
    token, parent = (jnp.take_along_axis(x, order, axis=1) for x in (token, parent))
    parent = jnp.take_along_axis(place, parent, axis=1)
    blank = ((0, 0), (0, max_drafts - num))
    return Drafts(
        num=jnp.minimum(granted, num_nodes),
        tokens=jnp.pad(token, blank),
        parents=jnp.pad(parent, blank),
    )
