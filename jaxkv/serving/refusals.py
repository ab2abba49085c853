"""Validation of an engine's arguments and requests; every error is one line."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxkv import validation
from jaxkv.engine import (
    REPRODUCIBLE_TREES,
    Drafter,
    EngineConfig,
    EngineParts,
    EngineRules,
    EngineState,
    Speculation,
    Verifier,
)
from jaxkv.memory import EVICTION_RULES, Eviction, Pages
from jaxkv.models import Forward
from jaxkv.parallel import check_mesh
from jaxkv.sampling import Sampling
from jaxkv.scheduling import check_policy

ADAPTER_BIT = 24
"""Lowest bit of the adapter's number in the salt of a sequence."""


def check_parts(parts: EngineParts, rules: EngineRules) -> EngineParts:
    """Checks the parts and rules of an engine.

    Returns:
      The parts with the tokens that end an answer.

    Raises:
      ValueError: a field has another type, `max_drafts` does not fit the speculation,
        or the end tokens do not fit the vocabulary or `max_stop_tokens`.
    """
    validation.instance("parts", parts, EngineParts)
    validation.instance("rules", rules, EngineRules)
    for fields, name, kinds in (
        (parts, "config", (EngineConfig,)),
        (parts, "pages", (Pages,)),
        (parts, "forward", (Forward,)),
        (parts, "tokenizer", (TextTokenizer, type(None))),
        (rules, "eviction", (Eviction, type(None))),
        (rules, "logits_fn", (Callable, type(None))),
        (rules, "speculation", (Speculation, type(None))),
    ):
        validation.instance(name, getattr(fields, name), *kinds)
    check_policy(rules.policy)
    check_mesh(parts.mesh)
    if parts.mesh is not None and parts.pages.states is not None:
        raise ValueError(
            "mesh must be None for a model with recurrent layers, whose states are not "
            "divided over devices"
        )
    if parts.mesh is not None and parts.pages.windowed is not None:
        raise ValueError("release_window_pages=True must be False on a mesh")
    config = parts.config
    if len({*parts.adapters}) != config.num_adapters:
        raise ValueError(
            f"num_adapters={config.num_adapters} must be the number of names in "
            f"adapters={list(parts.adapters)}"
        )
    if parts.mesh is not None and config.evict is not None:
        raise ValueError(f"evict={config.evict!r} must be None on a mesh")
    speculation = rules.speculation
    if speculation is not None:
        validation.instance("speculation.drafter", speculation.drafter, Drafter)
        validation.instance("speculation.verifier", speculation.verifier, Verifier)
    if (speculation is None) != (config.max_drafts == 0):
        raise ValueError(
            f"{config.max_drafts=} must be 0 without speculation, at least 1 with it"
        )
    has_tree = speculation is not None and speculation.drafter.width > 1
    if has_tree and config.numerics == "reproducible":
        raise ValueError(REPRODUCIBLE_TREES)
    if has_tree and parts.pages.states is not None:
        raise ValueError(
            "models with recurrent layers take chains of drafts, no token trees"
        )
    size = parts.vocab_size
    if size is not None:
        size = validation.integer("vocab_size", size, low=1)
    ids = parts.eos_ids
    if ids is None:
        ids = () if parts.tokenizer is None else parts.tokenizer.eos_ids
    eos_ids = validation.token_ids("eos_ids", ids, vocab_size=size).tolist()
    if len(eos_ids) > config.max_stop_tokens:
        raise ValueError(f"{len(eos_ids)=} must be at most {config.max_stop_tokens=}")
    if config.max_grammars and size is None:
        raise ValueError(f"{config.max_grammars=} needs vocab_size")
    return dataclasses.replace(parts, eos_ids=tuple(eos_ids), vocab_size=size)


def check_adapter(ask: Sampling, adapters: Sequence[str]) -> None:
    """Checks that an engine has the adapter of a request.

    Raises:
      ValueError: it has none of this name, or the salt has no room for its number.
    """
    if ask.adapter is not None and ask.adapter not in adapters:
        names = " or ".join(map(repr, adapters))
        need = f"must be {names}" if names else "must be None in an engine without any"
        raise ValueError(f"adapter={validation.format_value(ask.adapter)} {need}")
    if adapters and ask.salt >> ADAPTER_BIT:
        raise ValueError(
            f"salt={ask.salt} must be in [0, 2**{ADAPTER_BIT}) in an engine with "
            "adapters"
        )


def check_prefixes_move(state: EngineState) -> None:
    """Checks that cached prefixes can move to another engine.

    Raises:
      ValueError: the model has recurrent layers, whose states stay, or layers with a
        window whose pages stay.
    """
    if state.windows is not None:
        raise ValueError(
            "release_window_pages=True must be False where cached prefixes move to "
            "another engine, as in disaggregation"
        )
    if state.states is not None:
        raise ValueError(
            "cached prefixes of a model with recurrent layers cannot move to another "
            "engine: their pages lack the states; serve it without disaggregation"
        )


@runtime_checkable
class TextTokenizer(Protocol):
    """The methods of a tokenizer that an engine uses."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a prompt."""
        ...

    def stream(self) -> Any:
        """Returns a decoder with `push(token)` and `finish()`."""
        ...


def check_request(
    tokens: object,
    ask: object,
    *,
    config: EngineConfig,
    num_eos: int,
    vocab_size: int | None,
    has_text: bool,
    has_logits_fn: bool = False,
    adapters: Sequence[str] = (),
) -> list[int]:
    """Checks that an engine can serve a request.

    Args:
      tokens: prompt, expected to be a sequence of token ids.
      ask: sampling parameters, expected to be a `Sampling`.
      config: the engine's bounds.
      num_eos: number of the model's end tokens.
      vocab_size: bound on token ids; None does not check them.
      has_text: True if there is a tokenizer.
      has_logits_fn: True if the engine has a user function that changes logits.
      adapters: names of the engine's adapters.

    Returns:
      The prompt as a list.

    Raises:
      ValueError: the request does not fit; the message contains the bound.
    """
    if not isinstance(ask, Sampling):
        raise ValueError(
            f"sampling={validation.format_value(ask)} must be a Sampling or None"
        )
    check_adapter(ask, adapters)
    ids = _check_prompt(tokens, ask, config)
    limit = max(min(ids.size + ask.max_tokens, config.max_length), ids.size + 1)
    _check_answers(ask, ids.size, limit, config, has_logits_fn)
    _check_grammar(ask, config, num_eos, vocab_size)
    _check_tokens(ask, ids, config, num_eos, vocab_size, has_text)
    return ids.tolist()


def _check_prompt(tokens: object, ask: Sampling, config: EngineConfig) -> np.ndarray:
    """Returns the token ids of a prompt that leaves room for an answer.

    A single token needs no room, since the last one is not fed.
    """
    ids = validation.token_sequence("prompt", tokens)
    if not ids.size:
        raise ValueError("the prompt is empty; give at least one token")
    has_one_token = ask.max_tokens == 1 and ask.beam_width is None
    max_tokens = config.max_length if has_one_token else config.max_length - 1
    if ids.size > max_tokens:
        raise ValueError(
            f"the prompt has {ids.size} tokens, and {config.max_length=} "
            f"leaves room for at most {max_tokens}"
        )
    return ids


def _check_answers(
    ask: Sampling, num: int, limit: int, config: EngineConfig, has_logits_fn: bool
) -> None:
    """Checks the number and kind of answers to a prompt of `num` tokens.

    `limit` is the largest number of tokens of prompt and answer.
    """
    if ask.num_sequences > config.max_slots:
        raise ValueError(
            f"{ask.num_sequences} answers of one request must be at most "
            f"{config.max_slots=}"
        )
    if ask.num_sequences > 1 and config.evict in EVICTION_RULES:
        raise ValueError(
            f"{ask.num_sequences} answers of one request must be 1 with "
            f"evict={config.evict!r}"
        )
    if (ask.beam_width or 0) > config.max_beams:
        raise ValueError(f"{ask.beam_width=} must be at most {config.max_beams=}")
    if ask.beam_width is not None and has_logits_fn:
        raise ValueError(
            f"{ask.beam_width=} must be None in an engine with a logits_fn, which "
            "beams would not pass through"
        )
    # Otherwise a score would overflow.
    largest = limit ** abs(ask.length_penalty)
    if ask.beam_width is not None and largest > float(np.finfo(np.float32).max):
        raise ValueError(
            f"{ask.length_penalty=} takes the scores of up to {limit} tokens out of "
            "float32"
        )
    if ask.num_sequences > config.max_sequences:
        raise ValueError(
            f"{ask.num_sequences} answers of one request must be at most "
            f"{config.max_sequences=}"
        )
    shared = num // config.page_size
    pages = -(-(limit - 1) // config.page_size)
    pages = shared + ask.num_sequences * (pages - shared)
    if pages > config.num_pages:
        raise ValueError(
            f"the request may need {pages} pages, more than {config.num_pages=}"
        )


def _check_grammar(
    ask: Sampling, config: EngineConfig, num_eos: int, vocab_size: int | None
) -> None:
    """Checks that a request's grammar fits the engine."""
    if (grammar := ask.grammar) is None:
        return
    if not config.max_grammars:
        raise ValueError(f"{grammar=} needs max_grammars above 0")
    if not num_eos:
        raise ValueError(
            f"{grammar=} needs an end token of the model, and ignore_eos=False"
        )
    if grammar.table.size > config.max_grammar_cells:
        raise ValueError(
            f"{grammar=} has {grammar.table.size} cells, and must have at most "
            f"{config.max_grammar_cells=}"
        )
    if vocab_size is not None and grammar.classes.size > vocab_size:
        raise ValueError(
            f"{grammar=} is of {grammar.classes.size} tokens, more than {vocab_size=}"
        )


def _check_tokens(
    ask: Sampling,
    ids: np.ndarray,
    config: EngineConfig,
    num_eos: int,
    vocab_size: int | None,
    has_text: bool,
) -> None:
    """Checks token ids, stop tokens, stop strings and log-probabilities."""
    top = validation.INT32 if vocab_size is None else vocab_size
    outside = [
        *ids[(ids < 0) | (ids >= top)],
        *(x for x in ask.stop_tokens if x >= top),
    ]
    if outside:
        raise ValueError(f"token id {outside[0]} must be in [0, {top})")
    if len(ask.stop_tokens) + num_eos > config.max_stop_tokens:
        raise ValueError(
            f"{len(ask.stop_tokens)} stop tokens and {num_eos} end tokens of the model "
            f"must be at most {config.max_stop_tokens=}"
        )
    if ask.stop and not has_text:
        raise ValueError("stop strings need a tokenizer; use stop_tokens")
    is_raw = config.logprobs_mode == "raw_logprobs"
    if not is_raw and (ask.best_of or 0) > ask.n:
        raise ValueError(
            f"{ask.best_of=} must be {ask.n=} with {config.logprobs_mode=}: the best "
            "answers have the largest raw log-probability"
        )
    if (ask.logprobs or 0) > config.max_logprobs:
        raise ValueError(f"{ask.logprobs=} must be at most {config.max_logprobs=}")
    if ask.prompt_logprobs and config.num_logit_rows == config.max_slots:
        raise ValueError(
            f"prompt_logprobs need max_logit_rows above {config.max_slots=}"
        )


def check_request_id(name: str, value: object) -> int:
    """Checks a caller's id of a request.

    Raises:
      ValueError: it is not an integer in [0, 2**31).
    """
    return validation.integer(name, value, hint="a whole number in [0, 2**31)")


def pair_samplings(prompts: object, sampling: object) -> list[Any]:
    """Returns a `Sampling` for each prompt.

    Raises:
      ValueError: an argument is a single prompt or not a list, or lengths differ.
    """
    if isinstance(prompts, str | bytes):
        raise ValueError(
            f"prompts={validation.format_value(prompts)} must be "
            "a list of prompts: wrap a "
            "single one, [prompt]"
        )
    is_table = isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim > 0
    if not is_table and not isinstance(prompts, Sequence):
        raise ValueError(f"prompts={validation.format_value(prompts)} must be a list")
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * len(prompts)
    if not isinstance(sampling, Sequence) or isinstance(sampling, str | bytes):
        raise ValueError(
            f"sampling={validation.format_value(sampling)} must be "
            "a Sampling, or a list with "
            "one for each prompt"
        )
    if len(sampling) != len(prompts):
        raise ValueError(f"{len(sampling)=} samplings must be {len(prompts)=}")
    return list(sampling)
