"""Log-probabilities of given tokens, with the bits that an engine reports.

An engine with `numerics="reproducible"` computes every row in a tile of `ROW_TILE` rows
by a program that does not depend on the other rows. `score` runs the same products and
sums over the tokens of whole sequences, several tiles in a pass, so a trainer and its
engine agree in every bit about the log-probability of a token.

The tiles of a sequence depend on each other through its K and V. Reversing them is
slow, so the derivative is that of the ordinary forward pass, `models.logits`, which
computes the same function with other rounding.
"""

import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jaxkv import arrays, models, validation
from jaxkv.engine import EngineConfig
from jaxkv.memory import Pages, Rows
from jaxkv.models import (
    NO_EXPERT,
    ROW_TILE,
    ModelConfig,
    PagedForward,
    Params,
    WeightFormat,
    adapted_products,
    is_stacked,
    make_model_pages,
    merge,
    param_axes,
)
from jaxkv.parallel import (
    REPLICATED,
    check_mesh,
    fit_specs,
    map_over_mesh,
    pages_specs,
    param_specs,
)
from jaxkv.sampling import (
    Sampling,
    draw_logprobs,
    make_params,
    token_logprobs,
)

PAGE_SIZE = 64
"""Tokens of a page, those that attention gathers and sums together."""

MAX_TILES = 16
"""Tiles of rows that go through the layers together: a pass."""


class _Options(NamedTuple):
    """Static arguments of `score`."""

    config: ModelConfig
    sampling: Sampling | None
    mesh: Mesh | None


class _Packing(NamedTuple):
    """Tokens of all sequences as rows, without padding between them."""

    token: Int32[Array, " rows"]
    position: Int32[Array, " rows"]
    slot: Int32[Array, " rows"]
    """Sequence of each row; -1 for padding."""
    target: Int32[Array, " rows"]
    """The next token, arbitrary in the last row of a sequence."""
    routes: Int32[Array, "rows mixtures top_k"] | None
    """Experts of each row; None leaves the choice to the routers."""
    adapter: Int32[Array, " rows"] | None = None


class WeightsCost(NamedTuple):
    """Cost and gain of weights in 8 or 4 bits, compared with those of the model."""

    loss: float
    """Log-likelihood lost, in nats per token; below 0 if it grows."""
    error: float
    """Standard error of `loss` over the tokens."""
    nats_per_token: float
    """Negative log-likelihood of the model's own weights."""
    num_tokens: int
    """Tokens with a log-probability."""
    model_bytes: int
    """Bytes of all parameters in the model's type."""
    quantized_bytes: int
    """Bytes of all parameters with quantized weights."""


@validation.checks_numbers(max_length=(2, 2**31))
def weights_cost(
    folder: str | os.PathLike[str],
    tokens: Int[np.ndarray, " tokens"],
    *,
    weights: WeightFormat,
    dtype: DTypeLike = "float32",
    max_length: int = 512,
) -> WeightsCost:
    """Measures the log-likelihood of a text that quantized weights lose.

    The weights of both kinds are read one after the other, so that memory for one model
    suffices. The text should be none that the model was trained on.

    Args:
      folder: a folder or a bundled model, as for `models.load_model`.
      tokens: the text. It is divided into sequences of equal lengths; a shorter rest is
        left out.
      weights: format of the weights, as for `models.load_model`.
      dtype: type of all other parameters, and of the weights compared with.
      max_length: largest number of tokens of a sequence.

    Raises:
      ValueError: the model cannot be read, or there are fewer than 2 tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)=} must be at least 2")
    logprobs = []
    sizes = []
    for weight_format in ("model", weights):
        model = models.load_model(folder, dtype=dtype, weights=weight_format)
        length = min(max_length, len(tokens), model.config.max_positions)
        num = len(tokens) // length
        rows = np.asarray(tokens[: num * length], np.int32).reshape(num, length)
        scores = score(model.params, rows, config=model.config)
        logprobs.append(np.asarray(scores[:, 1:], np.float64))
        sizes.append(sum(x.nbytes for x in jax.tree.leaves(model.params)))
        del model
    difference = logprobs[0] - logprobs[1]
    return WeightsCost(
        loss=float(difference.mean()),
        error=float(difference.std() / difference.size**0.5),
        nats_per_token=float(-logprobs[0].mean()),
        num_tokens=difference.size,
        model_bytes=sizes[0],
        quantized_bytes=sizes[1],
    )


def score(
    params: Params,
    tokens: Int32[Array | np.ndarray, "sequences length"],
    lengths: Int32[Array | np.ndarray, " sequences"] | None = None,
    *,
    config: ModelConfig,
    sampling: Sampling | None = None,
    mesh: Mesh | None = None,
    routes: Int[Array | np.ndarray, "sequences length mixtures top_k"] | None = None,
    adapter: Int[Array | np.ndarray, " sequences"] | None = None,
    evict: str | None = None,
) -> Float[Array, "sequences length"]:
    """Returns the log-probability of each token given the tokens before it.

    Without `sampling` the result is equal, bit for bit, to the log-probabilities that
    an engine with `numerics="reproducible"` and K and V in the model's type reports for
    the same parameters on the same machine. It is differentiable by the parameters;
    its derivative is that of `log_softmax(models.logits(...))`. Under `vmap` the bits
    are others.

    Attention multiplies more queries at once than an engine's where a comparison on
    this machine, made while the function is traced, shows equal bits:
    `pallas_kernels.paged_attention.choose_run_queries` returns their number.

    Args:
      params: parameters of the model, as an engine takes them.
      tokens: prompt and answer of each sequence, with arbitrary padding.
      lengths: number of tokens of each sequence, in [0, length]; None means all.
        Passes that have only padding cost no time in the forward pass.
      config: architecture of the model, static.
      sampling: None for log-probabilities under the model's own logits. Otherwise those
        with which an engine draws each token after temperature, top-k, top-p and min-p:
        -inf for tokens that are cut off. Static.
      mesh: the engine's devices, over which the parameters are divided as by
        `Engine.load`; None means one device. Static.
      routes: experts of each token in each mixture, as an engine with
        `record_routes=True` reports them; -1 where the router chooses, for example in
        padding. Experts are those of `routes`, and their shares are computed from the
        scores of the router, also in the derivative: see `models.route`. None means the
        router's choice.
      adapter: adapter of each sequence in parameters that have them: 1 plus its index
        in `Engine.adapters`, or 0 for none. None means none.
      evict: None. The `evict` of an engine that evicted tokens is refused, since a
        token then does not attend to all tokens before it.

    Returns:
      Log-probabilities, at least float32, 0 at the first token and at padding.

    Raises:
      ValueError: the tokens are empty, a length in a NumPy array is out of range, the
        sequences exceed the model's learned positions, `sampling` has penalties,
        `evict` is a rule, or `routes` are not those of the tokens and the model, see
        `models.check_routes`.
    """
    if sampling is not None:
        validation.instance("sampling", sampling, Sampling)
        if sampling.grammar is not None:
            raise ValueError(f"{sampling.grammar=} must be None: score has no grammars")
        if sampling.adapter is not None:
            raise ValueError(f"{sampling.adapter=} must be None; see adapter=")
        for name in ("repetition", "presence", "frequency"):
            value = getattr(sampling, f"{name}_penalty")
            if value != (name == "repetition"):
                raise ValueError(
                    f"{name}_penalty={value} has no log-probability in score; "
                    "penalties must be off"
                )
    if evict is not None:
        raise ValueError(f"{evict=} must be None in score, which evicts no tokens")
    check_mesh(mesh)
    if not tokens.size:
        raise ValueError(f"{tokens.shape=} must have at least one token")
    params = arrays.to_jax_arrays(params)
    tokens = jnp.asarray(tokens)
    if lengths is None:
        lengths = np.full(tokens.shape[:1], tokens.shape[1], np.int32)
    elif isinstance(lengths, np.ndarray):
        is_valid = (lengths >= 0) & (lengths <= tokens.shape[1])
        if not is_valid.all():
            wrong = lengths[~is_valid].tolist()
            raise ValueError(f"lengths={wrong} must be in [0, {tokens.shape[1]}]")
    if routes is not None:
        models.check_routes(config, routes, tokens.shape)
        routes = jnp.asarray(routes, jnp.int32)
    if adapter is not None:
        adapter = jnp.asarray(adapter, jnp.int32)
    options = _Options(config, sampling, mesh)
    return _score(options, params, tokens, jnp.asarray(lengths), routes, adapter)


@functools.partial(jax.jit, static_argnums=0)
def _score(
    options: _Options,
    params: Params,
    tokens: Int32[Array, "sequences length"],
    lengths: Int32[Array, " sequences"],
    routes: Int32[Array, "sequences length mixtures top_k"] | None,
    adapter: Int32[Array, " sequences"] | None,
) -> Float[Array, "sequences length"]:
    return _by_tiles(options, params, tokens, lengths, routes, adapter)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_tiles(
    options: _Options,
    params: Params,
    tokens: Int32[Array, "sequences length"],
    lengths: Int32[Array, " sequences"],
    routes: Int32[Array, "sequences length mixtures top_k"] | None,
    adapter: Int32[Array, " sequences"] | None,
) -> Float[Array, "sequences length"]:
    """Runs the engine's program of `ROW_TILE` rows on all tokens."""
    num, length = tokens.shape
    columns = -(-length // PAGE_SIZE)
    bounds = EngineConfig(
        num_pages=num * columns,
        page_size=PAGE_SIZE,
        max_length=max(2, length),
        max_slots=num,  # recurrent layers have a state for each sequence
        token_budget=max(num, ROW_TILE),
    )
    dtype = params["embed"]["weight"].dtype
    pages = make_model_pages(options.config, bounds, dtype=dtype)
    end = jnp.cumsum(lengths, dtype=jnp.int32)
    packed = _pack(tokens, lengths, end, options)
    if routes is not None:
        place = packed.slot, packed.position
        packed = packed._replace(routes=arrays.take(routes, place, fill=NO_EXPERT))
    if adapter is not None:
        row_adapter = arrays.take(adapter, packed.slot, fill=0)
        packed = packed._replace(adapter=row_adapter)
    run = functools.partial(_run_tiles, options)
    if (mesh := options.mesh) is not None:
        axes = param_axes(
            options.config,
            stacked=is_stacked(params),
            adapted=adapted_products(params),
        )
        weights = fit_specs(params, param_specs(axes, mesh))
        in_specs = weights, pages_specs(pages), REPLICATED, REPLICATED, REPLICATED
        run = map_over_mesh(run, mesh, in_specs, REPLICATED)
    page_ids = jnp.arange(pages.num_pages, dtype=jnp.int32).reshape(num, columns)
    flat = run(params, pages, page_ids, packed, end[-1])
    place = jnp.arange(length, dtype=jnp.int32)[None, :]
    row = (end - lengths)[:, None] + place - 1
    has_logprob = (place > 0) & (place < lengths[:, None])
    return arrays.take(flat, jnp.where(has_logprob, row, -1), fill=0)


@_by_tiles.defjvp
def _differentiate(
    options: _Options, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    """Differentiates the ordinary forward pass in place of the tiles."""
    whole = functools.partial(_by_sequences, options)
    _, tangent = jax.jvp(whole, primals, tangents)
    return _by_tiles(options, *primals), tangent


def _by_sequences(
    options: _Options,
    params: Params,
    tokens: Int32[Array, "sequences length"],
    lengths: Int32[Array, " sequences"],
    routes: Int32[Array, "sequences length mixtures top_k"] | None,
    adapter: Int32[Array, " sequences"] | None,
) -> Float[Array, "sequences length"]:
    """Computes the log-probabilities by the ordinary forward pass."""
    num, length = tokens.shape
    logits = models.logits(
        params, tokens, config=options.config, routes=routes, adapter=adapter
    )
    logits = logits[:, :-1]
    logits = logits.reshape(-1, logits.shape[-1])
    logprobs = _logprobs_of(options, logits, tokens[:, 1:].reshape(-1))
    place = jnp.arange(1, length, dtype=jnp.int32)[None, :]
    logprobs = logprobs.reshape(num, -1)
    logprobs = jnp.where(place < lengths[:, None], logprobs, 0)
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def _logprobs_of(
    options: _Options,
    logits: Float[Array, "rows vocab"],
    tokens: Int32[Array, " rows"],
) -> Float[Array, " rows"]:
    """Returns log-probabilities of the tokens, under `sampling` if it is given."""
    if options.sampling is None:
        return token_logprobs(logits, tokens)
    one = make_params([options.sampling], [(0, 0)], [0])
    num = tokens.shape[0]
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape[1:])), one)
    return draw_logprobs(logits, tokens, rows)


def _pack(
    tokens: Int32[Array, "sequences length"],
    lengths: Int32[Array, " sequences"],
    end: Int32[Array, " sequences"],
    options: _Options,
) -> _Packing:
    """Packs the tokens in order of sequences and positions, so that they share tiles.

    There are at least two passes: the slice of a single one does not change from trip
    to trip, so XLA would compile another program of it, with other rounding.
    """
    num, length = tokens.shape
    size = _pass_size(options, num * length)
    num_rows = max(2, -(-num * length // size)) * size
    row = np.arange(num_rows, dtype=np.int32)
    slot = jnp.searchsorted(end, row, side="right").astype(jnp.int32)
    slot = jnp.where(row < end[-1], slot, -1)
    position = row - arrays.take(end - lengths, slot, fill=0)
    position = jnp.where(slot >= 0, position, -1)
    last = position + 1 >= arrays.take(lengths, slot, fill=0)
    following = jnp.where(last, -1, position + 1)
    return _Packing(
        arrays.take(tokens, (slot, position), fill=0),
        position,
        slot,
        arrays.take(tokens, (slot, following), fill=0),
        routes=None,
    )


def _run_tiles(
    options: _Options,
    params: Params,
    pages: Pages,
    page_ids: Int32[Array, "sequences columns"],
    packed: _Packing,
    num_rows: Int32[Array, ""],
) -> Float[Array, " rows"]:
    """Returns the log-probability of each row's next token."""
    size = _pass_size(options, packed.token.shape[0])
    attend = functools.partial(pages.layout.attend, long_runs=size > ROW_TILE)
    forward = PagedForward(options.config, "reproducible", attend=attend)
    model = merge(options.config, params)

    def score_tile(tile: tuple[Array, Array]) -> Array:
        hidden, target = tile
        # Otherwise XLA may fuse a small product with what follows, as no engine does.
        barrier = lax.optimization_barrier
        return _logprobs_of(options, barrier(model.logits(barrier(hidden))), target)

    def one(index: Array, carry: tuple[Array, Pages]) -> tuple[Array, Pages]:
        logprobs, pages = carry
        start = index * size
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), packed)
        rows = Rows(
            token=part.token,
            position=part.position,
            slot=part.slot,
            page_ids=page_ids,
            logit_rows=part.slot,
            adapter=part.adapter,
        )
        states = forward.states(model, pages, rows, routes=part.routes)
        hidden = states.last.reshape(-1, size // ROW_TILE, ROW_TILE).swapaxes(0, 1)
        new = lax.map(score_tile, (hidden, part.target.reshape(-1, ROW_TILE)))
        return (
            lax.dynamic_update_slice_in_dim(logprobs, new.reshape(-1), start, axis=0),
            states.carry,
        )

    dtype = np.promote_types(pages.dtype, np.float32)
    blank = jnp.zeros(packed.token.shape, dtype)
    # Two trips at least, since XLA inlines a loop of one.
    num_passes = jnp.maximum(2, (num_rows + size - 1) // size)
    return lax.fori_loop(0, num_passes, one, (blank, pages))[0]


def _pass_size(options: _Options, num_rows: int) -> int:
    """Returns the number of rows that go through the layers together.

    It is one tile where layers multiply rows outside of `Orientation.map_tiles`, with
    latent attention or experts; and on several devices, where bfloat16 has other bits.
    """
    config = options.config
    if config.latent is not None or config.experts is not None:
        return ROW_TILE
    if options.mesh is not None:
        return ROW_TILE
    return min(MAX_TILES, -(-num_rows // (2 * ROW_TILE))) * ROW_TILE
