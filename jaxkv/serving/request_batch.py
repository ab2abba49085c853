"""Packs requests and cached prefixes into NumPy arrays for the device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxkv import clock, scheduling, validation
from jaxkv.engine import EngineConfig, Requests
from jaxkv.memory import Pages, Prefix, check_content, expand_pages
from jaxkv.sampling import (
    AT_LENGTH,
    ESTIMATE,
    WHEN_FULL,
    Sampling,
    make_params,
    request_key,
)
from jaxkv.scheduling import RequestAttributes, attribute_columns
from jaxkv.serving import outputs, refusals
from jaxkv.serving.refusals import ADAPTER_BIT


@validation.checks_numbers()
def make_requests(
    prompts: Sequence[Sequence[int]],
    asks: Sequence[Sampling],
    *,
    config: EngineConfig,
    request_ids: Sequence[int] | None = None,
    key_ids: Sequence[int] | None = None,
    arrivals_s: Sequence[float] | None = None,
    attributes: Sequence[RequestAttributes | None] | None = None,
    eos_ids: tuple[int, ...] = (),
    width: int | None = None,
    adapters: Sequence[str] = (),
) -> Requests:
    """Packs requests for `requests.submit`, as NumPy arrays.

    Args:
      prompts: token ids, in order of arrival.
      asks: sampling parameters of each request.
      config: the engine's bounds.
      request_ids: the callers' ids; None counts from 0.
      key_ids: numbers that key the samples of requests without a seed; None means
        `request_ids`.
      arrivals_s: arrival time of each request in s; None means 0.
      attributes: attributes of each request, for the policy; None means the defaults.
      eos_ids: end tokens of the model.
      width: rows of the result, one for each sequence, the rest unused; None means the
        number of sequences.
      adapters: names of the engine's adapters, in their order.

    Returns:
      The requests. `submit` refuses those that do not fit the engine.

    Raises:
      ValueError: an argument has another type or is out of its range, or lengths
        differ.
    """
    token_lists, asks = _check_pairs(prompts, asks)
    num = len(prompts)
    names = _check_ids(
        "request_ids", range(num) if request_ids is None else request_ids, num
    )
    key_ids = names if key_ids is None else _check_ids("key_ids", key_ids, num)
    arrivals_s = [0.0] * num if arrivals_s is None else arrivals_s
    _check_length("arrivals_s", arrivals_s, num)
    arrivals_s = [validation.seconds("arrivals_s", x) for x in arrivals_s]
    attributes = [None] * num if attributes is None else attributes
    _check_length("attributes", attributes, num)
    checked_attributes = [scheduling.check_attributes(x) for x in attributes]
    # Request of each row, and index of the sequence in it.
    owner = [i for i, ask in enumerate(asks) for _ in range(ask.num_sequences)]
    samples = [sample for ask in asks for sample in range(ask.num_sequences)]
    width = len(owner) if width is None else validation.integer("width", width)
    if (unused := width - len(owner)) < 0:
        raise ValueError(
            f"{width=} must be at least {len(owner)}, one row for each sequence"
        )

    def column(values: object, dtype: type = np.int32, blank: int = 0) -> Any:
        """Repeats each request's value for its rows; pads with `blank`."""
        values = np.array(values, dtype)
        padding = np.full((unused, *values.shape[1:]), blank, dtype)
        return np.concatenate([values[np.array(owner, int)], padding])

    for ask in asks:
        refusals.check_adapter(ask, adapters)
    numbers = [1 + [*adapters].index(x.adapter) if x.adapter else 0 for x in asks]
    # Pages of one adapter are never found by a request of another.
    salts = [x.salt + (i << ADAPTER_BIT) for x, i in zip(asks, numbers, strict=True)]
    keys = [
        request_key(ask.seed, config.seed, key_id)
        for ask, key_id in zip(asks, key_ids, strict=True)
    ]
    ends = [ask.stop_tokens + (() if ask.ignore_eos else eos_ids) for ask in asks]
    if (num_ends := max(map(len, ends), default=0)) > config.max_stop_tokens:
        raise ValueError(
            f"{num_ends} tokens that end a request must be at most "
            f"{config.max_stop_tokens=}"
        )
    limits = [
        max(min(len(ids) + ask.max_tokens, config.max_length), len(ids) + 1)
        for ids, ask in zip(token_lists, asks, strict=True)
    ]
    keep_prompt_logprobs = column([ask.prompt_logprobs for ask in asks], bool)
    keep_prompt_logprobs[: len(owner)] &= (
        np.array(samples, int) == 0
    )  # the sequence that reads the prompt
    return Requests(
        tokens=column(_pad_rows(token_lists, config.max_length, 0)),
        prompt_length=column([len(ids) for ids in token_lists]),
        limit=column(limits),
        request_id=column(names),
        stop_tokens=column(_pad_rows(ends, config.max_stop_tokens, -1), blank=-1),
        params=make_params(
            [*[asks[i] for i in owner], *[Sampling.greedy()] * unused],
            [*[keys[i] for i in owner], *[np.zeros(2, np.uint32)] * unused],
            [*samples, *[0] * unused],
        ),
        salt=column(salts, np.uint32),
        use_prefix_cache=column([ask.prefix_cache for ask in asks], bool),
        keep_logprobs=column([outputs.needs_logprobs(ask) for ask in asks], bool),
        keep_prompt_logprobs=keep_prompt_logprobs,
        beam_width=column([ask.beam_width or 0 for ask in asks]),
        length_penalty=column([ask.length_penalty for ask in asks], np.float32),
        early_stopping=column([_STOP_RULES[ask.early_stopping] for ask in asks]),
        arrival=column(clock.from_seconds(np.array(arrivals_s, np.float64))),
        attributes=jax.tree.map(column, attribute_columns(checked_attributes)),
        grammar_state=column([-1] * num, blank=-1) if config.max_grammars else None,
        adapter=column(numbers) if config.num_adapters else None,
    )


def prefix_of(
    tokens: Sequence[int], salt: int, config: EngineConfig, vocab_size: int | None
) -> Prefix:
    """Returns the full pages of tokens as an argument of the compiled programs.

    Raises:
      ValueError: there is no prefix cache, there are too many tokens, a token is not in
        the vocabulary, or the salt is not in [0, 2**32), or [0, 2**24) in an engine
        with adapters, of which the prefix has none.
    """
    if not config.prefix_cache:
        raise ValueError(f"{config.prefix_cache=} must be True")
    prompt_ids = validation.token_ids("tokens", tokens, vocab_size=vocab_size)
    below = 1 << ADAPTER_BIT if config.num_adapters else 2**32
    salt = validation.integer("salt", salt, below=below)
    if len(prompt_ids) > config.max_length:
        raise ValueError(f"{len(prompt_ids)=} must be at most {config.max_length=}")
    # The last token is always fed.
    num_pages = max(len(prompt_ids) - 1, 0) // config.page_size
    padded = np.zeros(config.max_length, np.int32)
    padded[: len(prompt_ids)] = prompt_ids
    return Prefix(jnp.asarray(padded), jnp.int32(num_pages), jnp.uint32(salt))


def pad_pages(
    prefix: Prefix, pages: object, like: Pages, config: EngineConfig
) -> tuple[Prefix, PyTree[np.ndarray]]:
    """Pads received pages to the most that a sequence may have.

    Args:
      prefix: the tokens of the pages.
      pages: K and V arrays, as `Engine.take_prefix` returns them.
      like: page arrays of the receiving engine.
      config: bounds of the receiving engine.

    Returns:
      The prefix with the number of received pages, and the padded arrays.

    Raises:
      ValueError: the arrays do not fit the engine's.
    """
    num_pages = int(prefix.num_pages)
    leaves = jax.tree.leaves(pages)
    fits = jax.tree.structure(pages) == jax.tree.structure(like) and all(
        isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves
    )
    shapes = [(leaf.dtype.name, leaf.shape) for leaf in leaves] if fits else []
    count = check_content(like, shapes) if fits else num_pages + 1
    if count > num_pages:
        shown = "..." if fits else validation.format_value(pages)
        raise ValueError(
            f"pages={shown} must be arrays as take_prefix returns them, of at most "
            f"{num_pages} pages"
        )
    slot_pages = expand_pages(pages, config.max_pages_per_slot, slice(count))
    return prefix._replace(num_pages=jnp.int32(count)), slot_pages


def _pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray], width: int, blank: int
) -> np.ndarray:
    """Returns rows of one length: longer ones are cut, shorter ones padded."""
    matrix = np.full((len(rows), width), blank, np.int32)
    for row, ids in zip(matrix, rows, strict=True):
        row[: len(ids)] = ids[:width]
    return matrix


def _check_ids(name: str, values: Sequence[int], num: int) -> list[int]:
    """Checks one integer in [0, 2**31) for each of `num` requests."""
    _check_length(name, values, num)
    return [refusals.check_request_id(name, x) for x in values]


def _check_length(name: str, values: Sequence[object], num: int) -> None:
    if len(values) != num:
        raise ValueError(f"len({name})={len(values)} must be len(prompts)={num}")


def _check_pairs(
    prompts: Sequence[object], asks: Sequence[object]
) -> tuple[list[np.ndarray], list[Sampling]]:
    """Checks that there are token ids and a `Sampling` for each request."""
    if len(asks) != len(prompts):
        raise ValueError(f"{len(asks)=} must be {len(prompts)=}")
    samplings = []
    for i, ask in enumerate(asks):
        if not isinstance(ask, Sampling):
            raise ValueError(
                f"asks[{i}]={validation.format_value(ask)} must be a Sampling"
            )
        samplings.append(ask)
    prompt_lists = [
        validation.token_sequence(f"prompts[{i}]", x) for i, x in enumerate(prompts)
    ]
    for i, ids in enumerate(prompt_lists):
        outside = ids[(ids < 0) | (ids >= validation.INT32)]
        if outside.size:
            raise ValueError(f"prompts[{i}]: token id {outside[0]} is out of int32")
    return prompt_lists, samplings


_STOP_RULES: dict[bool | str, int] = {
    False: ESTIMATE,
    True: WHEN_FULL,
    "never": AT_LENGTH,
}
