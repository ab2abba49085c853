"""Drafts of a model: a smaller one that runs beside, or some of the target's layers.

The drafter feeds the last known token, draws one, feeds that, and so on, one row a slot
at a time. A model of its own has K and V of its own on the same pages
(`kv_pages.Pages.beside`), and reads whatever the target reads: wherever there are keys
of the target there are its own, through sharing, prefix cache, swap and preemption.
Layers of the target write to the target's pages, at places that verifying overwrites.

Source: Leviathan et al. 2023, arXiv:2211.17192, section 2 (a smaller model); Zhang et
al. 2024, arXiv:2309.08168 (skipped layers); Elhoushi et al. 2024, arXiv:2404.16710
(early exit).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxkv import arrays, validation
from jaxkv.engine.drafting import Drafter, Drafts
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.memory import Pages, kv_pages
from jaxkv.models import Forward, ForwardResult
from jaxkv.models.paged import PagedForward
from jaxkv.sampling import sampler
from jaxkv.speculation import draws


class TargetAndDraftParams(NamedTuple):
    """Parameters of a target, and of the model that drafts for it."""

    target: Any
    draft: Any


@dataclasses.dataclass(frozen=True)
class TargetWithDraft:
    """Feeds every row to both models: a `Forward` of `TargetAndDraftParams`."""

    target: Forward
    draft: Forward

    def __call__(
        self, params: TargetAndDraftParams, pages: Pages, rows: kv_pages.Rows
    ) -> ForwardResult:
        """Feeds the rows to both; logits are the target's."""
        assert pages.beside is not None
        result = self.target(params.target, pages._replace(beside=None), rows)
        own = self.draft(params.draft, pages.beside, rows).pages
        return result._replace(pages=result.pages._replace(beside=own))


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class DraftModel(Drafter):
    """Drafts what a model draws, one token after the other."""

    forward: Forward
    """The model that drafts."""
    has_own_model: bool = False
    """True if the draft model has its own parameters and pages, as in
    `TargetWithDraft`; False if it uses those of the target."""
    shares_noise: bool = True
    """True if drafts are sampled with the noise of the target, for
    `SharedNoiseVerifier`; False if they are sampled with separate noise and `Drafts`
    contain their probabilities, for `Rejection`."""

    def __post_init__(self) -> None:
        """Checks the type of every field.

        Raises:
          ValueError: a field has another type; the message shows it.
        """
        validation.settle(self)

    def propose(
        self,
        params: Any,
        memory: Any,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[Any, Pages, Drafts]:
        """Feeds and draws in turns, as often as the most that is granted."""
        own = state.pages.beside if self.has_own_model else state.pages
        weights = params.draft if self.has_own_model else params
        assert own is not None
        s = state.sequences
        row, slot = jnp.maximum(state.slots.sequence, 0), _count(granted.shape[0])
        known, tokens = s.num_tokens[row], s.tokens[row]

        def one(index: Array, carry: tuple[Array, Array | None, Pages]) -> Any:
            tokens, law, own = carry
            drafts = index < granted
            place = jnp.where(drafts, known - 1 + index, -1)
            result = self.forward(weights, own, make_slot_rows(state, tokens, place))
            params = jax.tree.map(lambda x: x[row], s.params)
            warm = jnp.where(drafts, params.temperature, 0.0)
            params, length = params._replace(temperature=warm), known + index
            logits = sampler.penalise(
                result.logits, tokens, s.prompt_length[row], length, params
            )
            if law is None:
                unscored = jnp.zeros_like(drafts)
                drawn = sampler.sample(logits, params, length, scored=unscored).token
            else:
                drawn, its = draws.draw_drafts(logits, params, length)
                drawn = jnp.maximum(drawn[:, 0], 0)
                law = lax.dynamic_update_index_in_dim(law, its, index, axis=1)
            at = (slot, jnp.where(drafts, place + 1, -1))
            return arrays.put(tokens, at, drawn), law, result.pages

        law = None
        if not self.shares_noise:
            rows = make_slot_rows(state, tokens, known)
            shape = jax.eval_shape(self.forward, weights, own, rows).logits
            sizes = shape.shape[0], config.emit_width, shape.shape[1]
            law = jnp.zeros(sizes, jnp.promote_types(shape.dtype, jnp.float32))
        carry = lax.fori_loop(0, jnp.max(granted), one, (tokens, law, own))
        tokens, law, own = carry
        places = known[:, None] + _count(config.max_drafts)[None, :]
        found = arrays.take(tokens, (slot[:, None], places), fill=0)
        pages = state.pages._replace(beside=own) if self.has_own_model else own
        return memory, pages, Drafts(granted, found, law)


def _count(num: int) -> Int32[Array, " {num}"]:
    return jnp.arange(num, dtype=jnp.int32)


def make_slot_rows(
    state: EngineState,
    tokens: Int32[Array, "slots max_length"],
    place: Int32[Array, " slots"],
) -> kv_pages.Rows:
    """One row a slot, whose logits are wanted; none where the place is -1."""
    slot = _count(place.shape[0])
    return kv_pages.Rows(
        token=arrays.take(tokens, (slot, place), fill=0),
        position=place,
        slot=None,
        page_ids=state.table.page_ids,
        logit_rows=jnp.where(place >= 0, slot, -1),
    )


def build_self_speculative(forward: PagedForward, layers: Sequence[int]) -> DraftModel:
    """A drafter that runs some layers of the target, in order.

    Args:
      forward: the target.
      layers: those that are run; the first few of them are an early exit.

    Raises:
      ValueError: there is none, one is not the target's, or they are not in order.
    """
    num_layers = forward.config.num_layers
    layers = validation.integers("layers", layers, below=num_layers)
    if not layers or list(layers) != sorted(set(layers)):
        raise ValueError(f"{layers=} must be one layer at least, each once, in order")
    return DraftModel(dataclasses.replace(forward, layers=layers))
