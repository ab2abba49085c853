"""Drafts sampled from a model: a smaller one, or some layers of the target.

The drafter feeds the last known token, samples a token, feeds that, and so on, one row
per slot at a time. A separate draft model has its own K and V on the same page ids
(`kv_pages.Pages.draft_pages`) and reads every row that the target reads, so its K and V
exist wherever the target's do: through sharing, prefix cache, swap and preemption.
Layers of the target write to the target's pages, in places that verification
overwrites.

Source: Leviathan et al. 2023, arXiv:2211.17192, section 2 (a smaller model); Zhang et
al. 2024, arXiv:2309.08168 (skipped layers); Elhoushi et al. 2024, arXiv:2404.16710
(early exit).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, PyTree

from jaxkv import arrays, sampling, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import Drafter, DrafterMemory, Drafts, EngineConfig, EngineState
from jaxkv.memory import Pages, Rows
from jaxkv.models import Forward, ForwardResult, PagedForward, Params
from jaxkv.speculation import draws


class TargetAndDraftParams(NamedTuple):
    """Parameters of a target model and of its drafter."""

    target: Params
    draft: Params


@dataclasses.dataclass(frozen=True)
class TargetWithDraft:
    """Feeds every row to both models: a `Forward` of `TargetAndDraftParams`."""

    target: Forward
    draft: Forward

    def __call__(
        self, params: TargetAndDraftParams, pages: Pages, rows: Rows
    ) -> ForwardResult:
        """Runs both models on the rows; returns the logits of the target."""
        assert pages.draft_pages is not None
        result = self.target(params.target, pages._replace(draft_pages=None), rows)
        draft_pages = self.draft(params.draft, pages.draft_pages, rows).pages
        return result._replace(pages=result.pages._replace(draft_pages=draft_pages))


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class DraftModel(Drafter):
    """Drafts tokens that a model samples one after another."""

    forward: Forward
    """Forward pass of the draft model."""
    has_own_model: bool = False
    """True if the draft model has its own parameters and pages, as in
    `TargetWithDraft`; False if it uses those of the target."""
    shares_noise: bool = True
    """True if drafts are sampled with the noise of the target, for
    `SharedNoiseVerifier`; False if they are sampled with separate noise and `Drafts`
    contain their probabilities, for `Rejection`."""

    def __post_init__(self) -> None:
        """Validates the type of every field.

        Raises:
          ValueError: a field has another type; the message shows it.
        """
        validation.check_fields(self)

    def propose(
        self,
        params: PyTree[ArrayOrShape],
        memory: DrafterMemory,
        state: EngineState,
        granted: Int32[Array, " slots"],
        config: EngineConfig,
    ) -> tuple[DrafterMemory, Pages, Drafts]:
        """Samples drafts in a loop of `max(granted)` forward passes."""
        draft_pages = state.pages.draft_pages if self.has_own_model else state.pages
        weights = params.draft if self.has_own_model else params
        assert draft_pages is not None
        s = state.sequences
        row = jnp.maximum(state.slots.sequence, 0)
        slot = _count(granted.shape[0])
        num_tokens = state.slots.num_tokens
        tokens = s.tokens[row]

        def sample_next(
            index: Array, carry: tuple[Array, Array | None, Pages]
        ) -> tuple[Array, Array | None, Pages]:
            tokens, probs, draft_pages = carry
            drafts = index < granted
            place = jnp.where(drafts, num_tokens - 1 + index, -1)
            result = self.forward(
                weights, draft_pages, make_slot_rows(state, tokens, place)
            )
            params = jax.tree.map(lambda x: x[row], s.params)
            warm = jnp.where(drafts, params.temperature, 0.0)
            params = params._replace(temperature=warm)
            length = num_tokens + index
            logits = sampling.penalise(
                result.logits, tokens, s.prompt_length[row], length, params
            )
            if probs is None:
                unscored = jnp.zeros_like(drafts)
                draws_of_step = sampling.sample(
                    logits, params, length, keep_logprobs=unscored
                ).token
            else:
                draws_of_step, new = draws.draw_drafts(logits, params, length)
                draws_of_step = jnp.maximum(draws_of_step[:, 0], 0)
                probs = lax.dynamic_update_index_in_dim(probs, new, index, axis=1)
            at = (slot, jnp.where(drafts, place + 1, -1))
            return arrays.put(tokens, at, draws_of_step), probs, result.pages

        probs = None
        if not self.shares_noise:
            rows = make_slot_rows(state, tokens, num_tokens)
            shape = jax.eval_shape(self.forward, weights, draft_pages, rows).logits
            sizes = shape.shape[0], config.emit_width, shape.shape[1]
            probs = jnp.zeros(sizes, jnp.promote_types(shape.dtype, jnp.float32))
        carry = tokens, probs, draft_pages
        tokens, probs, draft_pages = lax.fori_loop(
            0, jnp.max(granted), sample_next, carry
        )
        places = num_tokens[:, None] + _count(config.max_drafts)[None, :]
        drafted = arrays.take(tokens, (slot[:, None], places), fill=0)
        pages = (
            state.pages._replace(draft_pages=draft_pages)
            if self.has_own_model
            else draft_pages
        )
        return memory, pages, Drafts(granted, drafted, probs)


def _count(num: int) -> Int32[Array, " {num}"]:
    return jnp.arange(num, dtype=jnp.int32)


def make_slot_rows(
    state: EngineState,
    tokens: Int32[Array, "slots max_length"],
    place: Int32[Array, " slots"],
) -> Rows:
    """Makes one row per slot, with logits; none where `place` is -1."""
    slot = _count(place.shape[0])
    return Rows(
        token=arrays.take(tokens, (slot, place), fill=0),
        position=place,
        slot=None,
        page_ids=state.table.page_ids,
        logit_rows=jnp.where(place >= 0, slot, -1),
        window_ids=state.window_ids,
    )


def build_self_speculative(forward: PagedForward, layers: Sequence[int]) -> DraftModel:
    """Builds a drafter that runs some layers of the target, in order.

    Args:
      forward: forward pass of the target.
      layers: layers to run, ascending; the first few are an early exit.

    Raises:
      ValueError: `layers` is empty, has an index that the target does not have, or is
        not ascending.
    """
    num_layers = forward.config.num_layers
    layers = validation.integers("layers", layers, below=num_layers)
    if not layers or list(layers) != sorted(set(layers)):
        raise ValueError(f"{layers=} must be one layer at least, each once, in order")
    return DraftModel(dataclasses.replace(forward, layers=layers))
