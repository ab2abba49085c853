"""Drafts of an EAGLE drafter: deeper and deeper, and of all guesses the likeliest.

Beside the target its layer runs over every row that the target reads, each with the
feature of the token before it, so that its K and V are wherever the target's are:
through sharing, prefix cache, swap and preemption. To draft, it feeds the last known
token, then the likeliest guesses, and what these bring forth, each with the state of
its parent in place of a feature; their K and V stand at places that verifying
overwrites. In the end the likeliest nodes of all are drafted, likely as a whole way
from the root: a tree whose first nodes always are one.

Source: Li et al. 2024, arXiv:2406.16858 (EAGLE-2), section 4; Li et al. 2025,
arXiv:2503.01840 (EAGLE-3).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, validation
from jaxkv.engine.drafting import Drafter, Drafts
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import Pages, features
from jaxkv.memory.kv_pages import Rows
from jaxkv.models import Forward, ForwardResult, row_parts
from jaxkv.models.paged import PagedForward
from jaxkv.sampling import top_k
from jaxkv.speculation import draws, eagle, static_tree
from jaxkv.speculation.draft_model import Both, rows_of
from jaxkv.speculation.eagle import EagleConfig


@dataclasses.dataclass(frozen=True)
class Followed:
    """A model that an EAGLE drafter runs beside: a `Forward` of `Both` parameters."""

    target: Forward
    """The model, which keeps the taps of `config`."""
    config: EagleConfig
    """Shape of the drafter."""

    def __call__(self, params: Both, pages: Pages, rows: Rows) -> ForwardResult:
        """Feeds the rows to both; logits are the target's."""
        assert pages.beside is not None
        result = self.target(params.target, pages._replace(beside=None), rows)
        found = features.read_features(result.pages, rows, features.parent_places(rows))
        parts = row_parts.divide_rows(rows)
        x = eagle.inputs(
            params.draft,
            params.target,
            parts.own(rows.token),
            eagle.fuse(params.draft, parts.own(found.T).T),
            config=self.config,
        )
        model = eagle.merged(params.draft, params.target, self.config)
        ran = PagedForward(self.config.layer).states(model, pages.beside, rows, x)
        return result._replace(pages=result.pages._replace(beside=ran.carry))


class _Nodes(NamedTuple):
    """Guesses of one depth, those of a slot side by side; `n` of each."""

    token: Int32[Array, "slots n"]
    score: Float[Array, "slots n"]
    """Log-probability of the way to each; of chains, which have no other ways, any
    number; -inf where there is none."""
    parent: Int32[Array, "slots n"]
    """Which of all guesses each one's parent is, 0 the root, the others from 1 on."""
    state: Float[Array, "slots n hidden"]
    """The drafter's own, of the parent."""
    ancestors: Bool[Array, "slots n columns"]
    """Of the parent: which of the fed guesses lie on its way, itself among them."""


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Eagle(Drafter):
    """Drafts the likeliest guesses of an EAGLE drafter.

    Its `Forward` is `Followed`.
    """

    config: EagleConfig
    """Shape of the drafter."""
    beams: tuple[int, ...] = ()
    """Guesses that are continued at each depth, from 1 on; the tree is one deeper than
    there are entries. Each takes a draft's place for its K and V, so their sum is
    `EngineConfig.max_drafts` at most. None continued: the tree is one deep."""
    branching: int = 1
    """Guesses behind each token."""

    def __post_init__(self) -> None:
        """Refuses numbers below 1, and beams that are no guesses.

        Raises:
          ValueError: shows them.
        """
        validation.settle(self)
        most = 1
        for beam in self.beams:
            most *= self.branching
            if not 1 <= beam <= most:
                raise ValueError(f"beams={self.beams!r} must be in [1, {most}] there")
            most = beam

    @property
    def width(self) -> int:
        """Guesses behind each token."""
        return self.branching

    def propose(
        self,
        params: Both,
        memory: Any,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[Any, Pages, Drafts]:
        """Feeds the last known token, then depth by depth the likeliest guesses."""
        if sum(self.beams) > config.max_drafts:
            raise ValueError(
                f"sum of beams={self.beams!r} must be at most {config.max_drafts=}"
            )
        row = jnp.maximum(state.slots.sequence, 0)
        root = jnp.where(granted > 0, state.sequences.num_tokens[row] - 1, -1)
        own = state.pages.beside
        assert own is not None
        run = _Run(self, params, state, row, root, granted)
        nodes, own = run.first(own)
        found, start, offset = [nodes], 0, 0
        for depth, beam in enumerate(self.beams, 1):
            chosen, index = _likeliest(nodes, beam)
            name, start = start + 1 + index, start + nodes.token.shape[1]
            nodes, own = run.deeper(own, chosen, name, offset, depth)
            found.append(nodes)
            offset += beam
        choose = _chain if self.branching == 1 else _tree
        drafts = choose(found, granted, config.max_drafts)
        return memory, state.pages._replace(beside=own), drafts


def grown(
    config: EagleConfig, acceptance: Sequence[Sequence[float]], num: int
) -> Eagle:
    """A drafter of `num` drafts whose trees are as wide as pays on the average.

    At each depth it continues as many guesses as the best tree of that size does that
    is always the same, where guesses are right as often as `acceptance` says, by depth
    and rank; beyond its depths as often as at the last.
    """
    further = [*acceptance, *[acceptance[-1]] * max(0, num - len(acceptance))]
    tree = static_tree.build(further, num)
    depths = (0, *tree.depths)
    inner = [depths[parent] for parent in {*tree.parents} if parent]
    beams = tuple(inner.count(depth) for depth in range(1, max(depths)))
    return Eagle(config, beams, tree.width)


class _Run(NamedTuple):
    """What drafting of one step goes by."""

    drafter: Eagle
    params: Both
    state: EngineState
    row: Int32[Array, " slots"]
    """Of `Sequences`."""
    root: Int32[Array, " slots"]
    """Place of the last known token; -1 of slots that draft nothing."""
    granted: Int32[Array, " slots"]

    def first(self, own: Pages) -> tuple[_Nodes, Pages]:
        """Feeds the last known token of every slot."""
        rows = rows_of(self.state, self.state.sequences.tokens[self.row], self.root)
        found = features.read_features(self.state.pages, rows, self.root - 1)
        before = eagle.fuse(self.params.draft, found)
        there = (self.root >= 0)[:, None]
        columns = jnp.zeros((*there.shape, sum(self.drafter.beams)), bool)
        score = jnp.where(there, 0.0, -jnp.inf).astype(jnp.float32)
        return self._feed(own, rows, before, score, jnp.zeros_like(rows.token), columns)

    def deeper(
        self,
        own: Pages,
        chosen: _Nodes,
        name: Int32[Array, "slots n"],
        offset: int,
        depth: int,
    ) -> tuple[_Nodes, Pages]:
        """Feeds guesses of a depth, whose K and V stand `offset` places from the first.

        `name` says which of all guesses they are, as `_Nodes.parent` does.
        """
        num = chosen.token.shape[1]
        column = offset + jnp.arange(num, dtype=jnp.int32)[None, :]
        there = (column < self.granted[:, None]) & (chosen.score > -jnp.inf)
        root = self.root[:, None]
        place = jnp.where(there, root + 1 + column, -1)
        every = jnp.arange(chosen.ancestors.shape[2], dtype=jnp.int32)
        kin = chosen.ancestors | (every[None, None, :] == column[:, :, None])
        rows = Rows(
            token=chosen.token.reshape(-1),
            position=jnp.where(there, root + depth, -1).reshape(-1),
            slot=None,
            page_ids=self.state.table.page_ids,
            logit_rows=jnp.arange(place.size, dtype=jnp.int32),
        )
        if self.drafter.branching > 1:
            rows = rows._replace(
                place=place.reshape(-1),
                context=jnp.where(self.root >= 0, self.root + 1, -1),
                ancestors=kin.reshape(-1, kin.shape[2]),
            )
        score = jnp.where(there, chosen.score, -jnp.inf)
        states = chosen.state.reshape(-1, chosen.state.shape[2])
        return self._feed(own, rows, states, score, name.reshape(-1), kin)

    def _feed(
        self,
        own: Pages,
        rows: Rows,
        before: Float[Array, "rows hidden"],
        score: Float[Array, "slots n"],
        name: Int32[Array, " rows"],
        kin: Bool[Array, "slots n columns"],
    ) -> tuple[_Nodes, Pages]:
        """Runs the layer if there is any row, and gives every row's guesses."""
        config, width = self.drafter.config, self.drafter.branching
        num_slots, num = score.shape
        draft, target = self.params.draft, self.params.target

        def spread(x: Array) -> Array:
            return jnp.repeat(x.reshape(num_slots, num, -1), width, axis=1)

        def run(carry: tuple[_Nodes, Pages], rows: Rows, before: Array) -> Any:
            nodes, own = carry
            x = eagle.inputs(draft, target, rows.token, before, config=config)
            model = eagle.merged(draft, target, config)
            ran = PagedForward(config.layer).states(model, own, rows, x)
            asked = jax.tree.map(
                lambda x: jnp.repeat(x[self.row], num, axis=0),
                self.state.sequences.params,
            )
            said = model.logits(ran.last)
            ranked = draws.coupled(said, asked, rows.position + 1)
            # Of a chain nobody asks how likely it is.
            law = ranked if width == 1 else jax.nn.log_softmax(ranked)
            values, token = top_k.candidates(law, width)
            values = values.reshape(num_slots, -1).astype(nodes.score.dtype)
            nodes = nodes._replace(
                token=token.reshape(num_slots, -1),
                score=nodes.score + values,
                state=spread(ran.last.T),
            )
            return nodes, ran.carry

        total = spread(score)[:, :, 0]
        nodes = _Nodes(
            token=jnp.zeros(total.shape, jnp.int32),
            score=total,
            parent=spread(name)[:, :, 0],
            state=spread(jnp.zeros_like(before)),
            ancestors=spread(kin),
        )
        some = jnp.any(rows.position >= 0)
        return arrays.when(some, run, (nodes, own), rows, before)


def _likeliest(nodes: _Nodes, num: int) -> tuple[_Nodes, Int32[Array, "slots {num}"]]:
    """The best guesses of a depth, and which they are."""
    if nodes.token.shape[1] == 1:
        return nodes, jnp.zeros_like(nodes.token)
    _, index = lax.top_k(nodes.score, num)

    def pick(x: Array) -> Array:
        at = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, at, axis=1)

    return jax.tree.map(pick, nodes), index.astype(jnp.int32)


def _chain(
    found: list[_Nodes], granted: Int32[Array, " slots"], max_drafts: int
) -> Drafts:
    """Drafts the one guess of each depth."""
    token = jnp.concatenate([nodes.token for nodes in found], axis=1)[:, :max_drafts]
    num = token.shape[1]
    blank = ((0, 0), (0, max_drafts - num))
    return Drafts(num=jnp.minimum(granted, num), tokens=jnp.pad(token, blank))


def _tree(
    found: list[_Nodes], granted: Int32[Array, " slots"], max_drafts: int
) -> Drafts:
    """Drafts the likeliest of all guesses.

    A guess is never likelier than its parent, which of equals stands before it.
    """
    token, score, parent = (
        jnp.concatenate([getattr(nodes, name) for nodes in found], axis=1)
        for name in ("token", "score", "parent")
    )
    num = min(max_drafts, token.shape[1])
    best, order = lax.top_k(score, num)
    slot = jnp.arange(token.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.arange(1, num + 1, dtype=jnp.int32)[None, :]
    place = jnp.zeros((token.shape[0], token.shape[1] + 1), jnp.int32)
    named = jnp.broadcast_to(index, order.shape)
    place = arrays.put(place, (slot, order.astype(jnp.int32) + 1), named)
    there = jnp.sum(best > -jnp.inf, axis=1, dtype=jnp.int32)
    token, parent = (jnp.take_along_axis(x, order, axis=1) for x in (token, parent))
    parent = jnp.take_along_axis(place, parent, axis=1)
    blank = ((0, 0), (0, max_drafts - num))
    return Drafts(
        num=jnp.minimum(granted, there),
        tokens=jnp.pad(token, blank),
        parents=jnp.pad(parent, blank),
    )
