"""Sampling, from logits to tokens: penalties, truncation, draws, beam search."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.sampling.beam_search import (
        AT_LENGTH,
        ESTIMATE,
        WHEN_FULL,
        BeamParams,
        Beams,
        advance_beams,
        choices,
        finalize,
        follow_parents,
        make_beams,
    )
    from jaxkv.sampling.fixed_point import normalise, row_sums
    from jaxkv.sampling.grammars import (
        Grammar,
        GrammarTables,
        load_grammar,
        make_grammar_tables,
        mask_forbidden,
        next_grammar_state,
    )
    from jaxkv.sampling.json_schemas import json_object_schema
    from jaxkv.sampling.params import Params, Sampling, greedy_params, make_params
    from jaxkv.sampling.random_keys import (
        ACCEPT,
        DRAFT,
        RESIDUAL,
        SAMPLE,
        draw_key,
        exponential,
        gumbel,
        request_key,
        request_keys,
        uniform,
    )
    from jaxkv.sampling.sampler import (
        Draw,
        draw_logprobs,
        greedy,
        is_plain,
        penalise,
        probabilities,
        sample,
        token_logprobs,
        top_logprobs,
    )
    from jaxkv.sampling.top_k import argmax, candidates, is_finite, wide

__all__, __getattr__, __dir__ = lazy_exports(__name__)
