"""Logits to tokens: penalties, cut-offs, Gumbel-max draws and log-probabilities.

Every request brings its own parameters, as arrays, so one program serves any mix. A
row's result depends on that row alone: its noise is a function of (request or seed,
sample, position, purpose, token id); which of two exact ways settles its cut-offs is
decided by the row itself; and every sum over the vocabulary is a sum of integers, which
comes out the same in whatever order a batch makes XLA add. Nothing sorts the
vocabulary, and work that no row asks for is skipped.

The law of a row: penalties, then temperature, then top-k, then top-p over what top-k
kept, then min-p, in the order of Hugging Face's warpers. Tokens rank by logit, equal
ones by lower id: top-k keeps exactly k, and top-p the shortest run of ranks whose
probability reaches its share.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt, UInt32

SAMPLE, DRAFT, ACCEPT, RESIDUAL = range(4)
"""What a draw is for. The draws of one position differ by it: the token itself, a
draft's token, the verdict on a draft, the token after a draft was turned down."""

MAX_CANDIDATES = 64
"""Top tokens among which cut-offs are settled first, unless the caller says."""

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request wants its tokens drawn, and what ends it."""

    temperature: float = 1.0
    """Divides the logits, finite, at least 0; 0 takes the most likely token."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    top_p: float = 1.0
    """Probability that the kept tokens reach, in (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """Smallest probability kept, as a share of the largest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that stand in
    the prompt or the answer, above 0; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that stand in the answer, finite."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit for each time its token stands in the answer, finite."""
    seed: int | None = None
    """Fixes the draws whatever the engine's seed and the request's id, in
    [0, 2**64)."""
    max_tokens: int = 64
    """Tokens after which the answer ends, at least 1."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, none of them empty."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the answer."""
    ignore_eos: bool = False
    """Whether the answer goes on after the model's own end token."""
    logprobs: int | None = None
    """Alternatives reported with each token's log-probability, at least 0; None
    reports neither."""
    prompt_logprobs: bool = False
    """Whether the prompt's tokens get log-probabilities, too."""

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
          ValueError: a field is out of its range; the message shows it.
        """
        penalties = (self.presence_penalty, self.frequency_penalty)
        for right, wrong in (
            (0 <= self.temperature <= _LARGEST, f"{self.temperature=} must be >= 0"),
            (_is_count(self.top_k), f"{self.top_k=} must be a count, or 0 for off"),
            (0 < self.top_p <= 1, f"{self.top_p=} must be in (0, 1]"),
            (0 <= self.min_p <= 1, f"{self.min_p=} must be in [0, 1]"),
            (
                _SMALLEST <= self.repetition_penalty <= _LARGEST,
                f"{self.repetition_penalty=} must be above 0 and finite",
            ),
            (
                all(abs(penalty) <= _LARGEST for penalty in penalties),
                f"{self.presence_penalty=}, {self.frequency_penalty=} must be finite",
            ),
            (
                self.seed is None or _is_count(self.seed, below=2**64),
                f"{self.seed=} must be None or an integer in [0, 2**64)",
            ),
            (
                _is_count(self.max_tokens) and self.max_tokens > 0,
                f"{self.max_tokens=} must be at least 1",
            ),
            (
                _is_tuple(self.stop, lambda text: isinstance(text, str) and text),
                f"{self.stop=} must be a tuple of strings, none of them empty",
            ),
            (
                _is_tuple(self.stop_tokens, _is_count),
                f"{self.stop_tokens=} must be a tuple of token ids",
            ),
            (
                self.logprobs is None or _is_count(self.logprobs),
                f"{self.logprobs=} must be None or at least 0",
            ),
        ):
            if not right:
                raise ValueError(wrong)

    @classmethod
    def greedy(cls, **fields: Any) -> "Sampling":
        """The most likely token at every position; `fields` sets everything else."""
        return cls(temperature=0.0, **fields)


def _is_count(value: Any, below: int = 2**31) -> bool:
    return isinstance(value, int | np.integer) and 0 <= value < below


def _is_tuple(value: Any, fits: Callable[[Any], object]) -> bool:
    return isinstance(value, tuple) and all(fits(entry) for entry in value)


class Params(NamedTuple):
    """What drawing needs to know of each row's request. Ranges as in `Sampling`."""

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    repetition: Float[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]
    key: UInt32[Array, "rows 2"]
    """The request's key, see `request_key`."""
    sample: Int32[Array, " rows"]
    """Which of the request's answers the row belongs to, from 0."""


def params_of(
    requests: Sequence[Sampling], keys: Sequence[Any], samples: Sequence[int]
) -> Params:
    """Lines up the parameters of several sequences.

    Args:
      requests: the parameters of each sequence's request.
      keys: what `request_key` gave for each.
      samples: which of its request's answers each sequence is.

    Returns:
      The parameters as NumPy arrays, one row per sequence.
    """
    fields = {
        "temperature": ("temperature", np.float32),
        "top_k": ("top_k", np.int32),
        "top_p": ("top_p", np.float32),
        "min_p": ("min_p", np.float32),
        "repetition": ("repetition_penalty", np.float32),
        "presence": ("presence_penalty", np.float32),
        "frequency": ("frequency_penalty", np.float32),
    }
    columns: dict[str, Any] = {
        field: np.array([getattr(each, name) for each in requests], kind)
        for field, (name, kind) in fields.items()
    }
    columns["key"] = np.array(keys, np.uint32).reshape(len(requests), 2)
    columns["sample"] = np.array(samples, np.int32)
    return Params(**columns)


def greedy_params(rows: int) -> Params:
    """Parameters of rows that nobody uses: greedy, everything else off."""
    blank = params_of([Sampling.greedy()] * rows, [(0, 0)] * rows, [0] * rows)
    return jax.tree.map(jnp.asarray, blank)


# Keys and noise


def request_key(seed: int | None, engine_seed: int, request_id: int) -> np.ndarray:
    """Makes a request's key: of the caller's seed, else of the engine's and the id.

    Runs on the host without JAX, so that submitting a request launches nothing. The
    bits are those of `jax.random.key(seed)`, or of `fold_in` of `engine_seed`'s key and
    the id, under "threefry2x32" and with 64-bit integers enabled.

    Args:
      seed: the caller's seed in [0, 2**64), or None.
      engine_seed: likewise, used where `seed` is None.
      request_id: the caller's name for the request, in [0, 2**32), never its rank in
        the order of arrival.

    Returns:
      Key data, uint32 of shape [2].

    Raises:
      ValueError: a number is out of its range.
    """
    chosen = engine_seed if seed is None else seed
    if not 0 <= chosen < 2**64:
        raise ValueError(f"{seed=}, {engine_seed=} must be in [0, 2**64)")
    if not 0 <= request_id < 2**32:
        raise ValueError(f"{request_id=} must be in [0, 2**32)")
    # Arrays, not scalars: NumPy warns where a scalar wraps.
    words = np.array([chosen >> 32, chosen & 0xFFFFFFFF], np.uint32)
    if seed is not None:
        return words
    counter = np.array([0, request_id], np.uint32)
    return np.concatenate(_threefry(words[:1], words[1:], counter[:1], counter[1:]))


def draw_key(
    key: UInt32[Array, "*rows 2"],
    sample: Int32[Array, "*rows"],
    position: Int32[Array, "*rows"],
    purpose: int,
) -> UInt32[Array, "*rows 2"]:
    """Folds a request's key into the key of one draw.

    Args:
      key: the request's key.
      sample: which of the request's answers.
      position: where the drawn token will stand in the sequence.
      purpose: `SAMPLE`, `DRAFT`, `ACCEPT` or `RESIDUAL`.

    Returns:
      The draws' key data, what `jax.random.fold_in` gives for sample, position and
      purpose in turn.
    """
    for data in (sample, position, jnp.full_like(position, purpose)):
        counter = data.astype(jnp.uint32)
        words = _threefry(key[..., 0], key[..., 1], jnp.zeros_like(counter), counter)
        key = jnp.stack(words, axis=-1)
    return key


def gumbel(
    key: UInt32[Array, "rows 2"], ids: Int32[Array, "#rows tokens"], dtype: Any
) -> Float[Array, "rows tokens"]:
    """Draws standard Gumbel noise, a function of (key, token id) alone.

    The 32 bits behind it, those that `jax.random.bits` gives at index `id`, count a
    uniform number *up from zero*, where large noise comes from. A float32 is finest
    there, so that even the largest of 100,000 tie about once in 40,000 draws.

    Args:
      key: the key of each row's draw.
      ids: token ids.
      dtype: of the noise; float32 and float64 noise differ by rounding alone.

    Returns:
      Finite noise, at most 22.9.
    """
    counter = ids.astype(jnp.uint32)
    words = _threefry(key[:, :1], key[:, 1:], jnp.zeros_like(counter), counter)
    uniform = ((words[0] ^ words[1]).astype(dtype) + 0.5) * 2.0**-32
    # Rounded to 1, a token would get -inf and might lose a race it runs alone.
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _threefry(key0: Any, key1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, on uint32 arrays of NumPy or JAX alike.

    Spelled out because XLA then fuses it into the pass over the logits. JAX's own runs
    as a loop on the CPU, 6 times slower over a large vocabulary.

    Source: Salmon et al. 2011, doi:10.1145/2063384.2063405.
    """
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


# Penalties


def penalise(
    logits: Float[Array, "rows vocab"],
    tokens: Int32[Array, "rows max_length"],
    prompt_length: Int32[Array, " rows"],
    num_tokens: Int32[Array, " rows"],
    params: Params,
) -> Float[Array, "rows vocab"]:
    """Applies repetition, frequency and presence penalties, in this order.

    Repetition looks at prompt and answer, the others at the answer alone. A row whose
    penalties are off comes out bit for bit, and a batch of such rows skips the work.

    Args:
      logits: next-token logits.
      tokens: prompt and answer so far.
      prompt_length: how many of them are the prompt.
      num_tokens: how many of them there are; what stands beyond is ignored, as are ids
        outside [0, vocab).
      params: `repetition`, `frequency` and `presence` are read.

    Returns:
      The penalised logits.

    Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1 (repetition, with the sign
    rule of Hugging Face and vLLM); the OpenAI API (frequency, presence).
    """
    logits = _wide(logits)
    rows, vocab = logits.shape

    def apply() -> Array:
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        answer = (place >= prompt_length[:, None]).astype(jnp.int32)
        counts = jnp.zeros((rows, 2, vocab), jnp.int32)
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        token = jnp.where(place < num_tokens[:, None], tokens, vocab)
        counts = counts.at[row, answer, token].add(
            1, mode="drop", wrap_negative_indices=False
        )
        uses = counts[:, 1].astype(logits.dtype)
        repetition, presence, frequency = (
            each.astype(logits.dtype)[:, None]
            for each in (params.repetition, params.presence, params.frequency)
        )
        divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
        result = jnp.where(jnp.any(counts > 0, axis=1), divided, logits)
        return result - frequency * uses - presence * (uses > 0).astype(logits.dtype)

    on = (params.repetition != 1) | (params.presence != 0) | (params.frequency != 0)
    return lax.cond(jnp.any(on), apply, lambda: logits)


# Searching rows


def _wide(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Logits in at least float32."""
    narrow = jnp.finfo(logits.dtype).bits < 32
    return logits.astype(jnp.float32) if narrow else logits


def _unsigned_zero(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Makes -0 a 0: they are equal, but top_k and bit patterns tell them apart."""
    return jnp.where(logits == 0, jnp.zeros_like(logits), logits)


def _blocks(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows blocks block"]:
    """Cuts rows into blocks of about 64, of which a first pass keeps the maxima."""
    rows, vocab = logits.shape
    # A divisor, since filling up the last block would copy the logits.
    sizes = [size for size in range(16, 129) if vocab % size == 0]
    size = min(sizes, key=lambda size: abs(size - 64), default=64)
    if vocab % size:
        padding = ((0, 0), (0, -vocab % size))
        logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
    return logits.reshape(rows, -1, size)


def _ids_of(block: Int32[Array, "rows blocks"], size: int) -> Int32[Array, "rows n"]:
    inside = jnp.arange(size, dtype=jnp.int32)[None, None, :]
    return (block[:, :, None] * size + inside).reshape(block.shape[0], -1)


def _first(
    where: Bool[Array, "rows n"], ids: Int32[Array, "#rows n"]
) -> Int32[Array, " rows"]:
    """The lowest of the marked ids; 0 where none is."""
    none = np.iinfo(np.int32).max
    lowest = jnp.min(jnp.where(where, ids, none), axis=1)
    return jnp.where(lowest == none, 0, lowest)


Score = Callable[[Array, Array], Array]
"""(logits [rows, n], ids [rows or 1, n]) -> the scores that are to be compared."""


def _argmax(
    logits: Float[Array, "rows vocab"], score: Score = lambda logits, ids: logits
) -> tuple[Float[Array, " rows"], Int32[Array, " rows"]]:
    """Finds the best token, the lowest id among equals, and its score.

    One pass reduces the row to the best score of each block, then one block is looked
    at again. XLA's own argmax compares token by token: 30 times slower on a CPU.
    """
    rows, vocab = logits.shape
    blocks = _blocks(logits)
    _, num_blocks, size = blocks.shape
    every = jnp.arange(num_blocks, dtype=jnp.int32)[None, :]
    ids = _ids_of(every, size)
    scores = score(blocks.reshape(rows, -1), ids).reshape(blocks.shape)
    peaks = jnp.max(scores, axis=2)
    top = jnp.max(peaks, axis=1)
    best = _first(peaks == top[:, None], every)[:, None]
    inside = jnp.take_along_axis(blocks, best[:, :, None], axis=1).reshape(rows, -1)
    ids = _ids_of(best, size)
    scores = score(inside, ids)
    # Computed twice, a score may differ in its last bit: compare like with like.
    peak = jnp.max(scores, axis=1, keepdims=True)
    return top, _first((scores == peak) & (ids < vocab), ids)


def _invalid(
    logits: Float[Array, "rows vocab"], top: Float[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Rows with a NaN, or with nothing but -inf.

    XLA's CPU maximum loses NaN in some shapes, so `top` does not tell. A sum keeps it
    and costs a third of looking at every logit; that is done only where a sum is NaN,
    as it also is where +inf meets -inf.
    """
    suspect = jnp.any(jnp.isnan(jnp.sum(logits, axis=1)))
    nan = lax.cond(
        suspect,
        lambda: jnp.any(jnp.isnan(logits), axis=1),
        lambda: jnp.zeros(top.shape, bool),
    )
    return nan | (top == -jnp.inf)


def _candidates(
    logits: Float[Array, "rows vocab"], num: int
) -> tuple[Float[Array, "rows num"], Int32[Array, "rows num"]]:
    """The `num` best tokens of each row, best first, lower ids first among equals.

    They lie in the `num` blocks with the largest maxima: each of these holds a token
    that ranks before all those of the other blocks. Do not slice the result: XLA would
    merge the two slices, no longer see a top-k and sort.
    """
    if num < 1:
        raise ValueError(f"max_candidates={num} must be at least 1")
    num = min(num, logits.shape[1])
    blocks = _blocks(logits)
    rows, num_blocks, size = blocks.shape
    if num_blocks <= 2 * num:
        values, ids = lax.top_k(_unsigned_zero(logits), num)
        return values, ids
    _, chosen = lax.top_k(_unsigned_zero(jnp.max(blocks, axis=2)), num)
    # In the order of ids again, by which top_k breaks ties.
    chosen = jnp.sort(chosen, axis=1)
    inside = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    inside = _unsigned_zero(inside).reshape(rows, -1)
    values, place = lax.top_k(inside, num)
    return values, jnp.take_along_axis(_ids_of(chosen, size), place, axis=1)


# Sums of probability. A mass is three integers, the digits of a fixed-point number:
# they add up exactly, hence alike in any order, and are compared without rounding.

Mass = tuple[Array, ...]


def _digits(values: Float[Array, "*shape"], bits: int) -> Mass:
    """Three digits, `bits` wide each, of numbers >= 0; the first holds all above."""
    digits = []
    for _ in range(3):
        values = values * 2.0**bits
        whole = jnp.floor(values)
        digits.append(whole.astype(jnp.int32))
        values = values - whole
    return tuple(digits)


def _carried(mass: Mass, bits: int) -> Mass:
    first, second, third = mass
    second = second + (third >> bits)
    mask = (1 << bits) - 1
    return first + (second >> bits), second & mask, third & mask


def _digit_bits(vocab: int) -> int:
    """The widest digits of which `vocab` add up without overflow: 15 at 50,000."""
    return 31 - vocab.bit_length()


def _total(digits: Mass, bits: int) -> Mass:
    """Adds up the digits of each row."""
    zero = (np.int32(0),) * len(digits)
    # One reduction of three, so that XLA computes the digits once.
    total = lax.reduce(digits, zero, lambda a, b: tuple(map(operator.add, a, b)), (1,))
    return _carried(tuple(total), bits)


def _reaches(mass: Mass, target: Mass) -> Array:
    reached = mass[-1] >= target[-1]
    for ours, theirs in zip(mass[-2::-1], target[-2::-1], strict=True):
        reached = (ours > theirs) | ((ours == theirs) & reached)
    return reached


def _number(mass: Mass, bits: int, dtype: Any) -> Array:
    digits = (m.astype(dtype) * 2.0 ** (-bits * (i + 1)) for i, m in enumerate(mass))
    first, second, third = digits
    return first + (second + third)


def _share(part: Float[Array, " rows"], total: Mass, bits: int, dtype: Any) -> Mass:
    """`part` of a mass, rounded to `dtype` and never above the mass itself."""
    share = _digits(part.astype(dtype) * _number(total, bits, dtype), bits)
    over = _reaches(share, total)
    return tuple(jnp.where(over, t, s) for t, s in zip(total, share, strict=True))


# Cut-offs


class Cut(NamedTuple):
    """The last token a row keeps; of equal logits the lower ids are kept first."""

    value: Float[Array, " rows"]
    token: Int32[Array, " rows"]


def _scaled(
    logits: Float[Array, "rows n"], top: Float[Array, " rows"], params: Params
) -> Float[Array, "rows n"]:
    """Log-probabilities but for a constant: 0 at the largest logit, also at +inf."""
    # Temperature 0 is settled elsewhere; it only must not divide.
    warm = jnp.where(params.temperature > 0, params.temperature, 1.0)
    below = (logits - top[:, None]) / warm.astype(logits.dtype)[:, None]
    return jnp.where(logits == top[:, None], jnp.zeros_like(below), below)


def _above_min_p(
    scaled: Float[Array, "rows n"], params: Params
) -> Bool[Array, "rows n"]:
    share = params.min_p.astype(scaled.dtype)
    # -log1p is the log. XLA's CPU log itself rounds differently in batches of 3, 5, 6
    # and 7 rows than in others.
    return scaled >= -jnp.log1p((1 - share) / share)[:, None]


def _is_cut(params: Params, vocab: int) -> Bool[Array, " rows"]:
    """Rows that top-k or top-p cuts; min-p needs no search."""
    return ((params.top_k > 0) & (params.top_k < vocab)) | (params.top_p < 1)


def _settle(
    logits: Float[Array, "rows vocab"],
    top: Float[Array, " rows"],
    values: Float[Array, "rows num"],
    params: Params,
    wanted: Bool[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Bool[Array, " rows"]]:
    """Tries to settle top-k and top-p by the best tokens alone.

    Args:
      logits: all of them, read only where a row needs its whole mass.
      top: the best of them.
      values: the best `num` of them, descending.
      params: `top_k` and `top_p` are read.
      wanted: rows whose answer matters.

    Returns:
      How many tokens are kept, and whether that is settled; if not, more are kept than
      there are values, or top-k keeps more than that before top-p.
    """
    vocab, num, dtype = logits.shape[1], values.shape[1], logits.dtype
    bits = _digit_bits(vocab)
    counted = (params.top_k > 0) & (params.top_k < vocab)
    inside = (counted & (params.top_k <= num)) | (num == vocab)
    limit = jnp.where(counted & inside, params.top_k, num)
    nucleus = params.top_p < 1

    weights = jnp.exp(_scaled(values, top, params))
    place = jnp.arange(num, dtype=jnp.int32)[None, :]
    weights = jnp.where(place < limit[:, None], weights, 0)
    running = jnp.cumsum(jnp.stack(_digits(weights, bits)), axis=2, dtype=jnp.int32)
    running = _carried(tuple(running), bits)

    within = tuple(digit[:, -1] for digit in running)
    whole = lax.cond(
        jnp.any(wanted & nucleus & ~counted & ~inside),
        lambda: _total(_digits(jnp.exp(_scaled(logits, top, params)), bits), bits),
        lambda: within,
    )
    total = tuple(jnp.where(inside, a, b) for a, b in zip(within, whole, strict=True))
    target = _share(params.top_p, total, bits, dtype)
    short = ~_reaches(running, tuple(digit[:, None] for digit in target))
    reach = 1 + jnp.sum(short, axis=1, dtype=jnp.int32)
    kept = jnp.where(nucleus, reach, limit)
    return kept, (kept <= limit) & (inside | (nucleus & ~counted))


def _exact_cut(
    logits: Float[Array, "1 vocab"], top: Float[Array, " 1"], params: Params
) -> Cut:
    """Settles top-k and top-p of one row by bisection, whatever it looks like.

    The row must be cut, and hold neither NaN nor -inf alone.
    """
    vocab, dtype = logits.shape[1], logits.dtype
    bits, order = _digit_bits(vocab), _order(logits)
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]

    def narrow(stage: Array, last: tuple[Array, Array]) -> tuple[Array, Array]:
        # First top-k, every token weighing 1, then top-p.
        weights = jnp.exp(_scaled(logits, top, params))
        weights = jnp.where(stage == 0, jnp.ones_like(weights), weights)
        kept = _upto(order, ids, last)
        digits = _digits(jnp.where(kept, weights, 0), bits)
        share = _share(params.top_p, _total(digits, bits), bits, dtype)
        count = _digits(params.top_k.astype(dtype), bits)
        target = tuple(
            jnp.where(stage == 0, k, p) for k, p in zip(count, share, strict=True)
        )
        return _last(order, ids, _order(top), digits, bits, target)

    counted = (params.top_k > 0) & (params.top_k < vocab)
    first_stage = jnp.where(counted, 0, 1)[0]
    end_stage = jnp.where(params.top_p < 1, 2, 1)[0]
    everything = jnp.zeros_like(order[:, 0]), jnp.full((1,), vocab, jnp.int32)
    key, token = lax.fori_loop(first_stage, end_stage, narrow, everything)
    return Cut(_value(key, dtype), token)


def _order(values: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Unsigned integers that compare as the floats do (no NaN among them)."""
    raw = lax.bitcast_convert_type(
        _unsigned_zero(values), jnp.dtype(f"uint{values.dtype.itemsize * 8}")
    )
    sign = ~(~jnp.zeros_like(raw) >> 1)
    return jnp.where(raw >= sign, ~raw, raw | sign)


def _value(order: UInt[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """The inverse of `_order`."""
    sign = ~(~jnp.zeros_like(order) >> 1)
    raw = jnp.where(order >= sign, order ^ sign, ~order)
    return lax.bitcast_convert_type(raw, dtype)


def _upto(values: Array, ids: Array, last: tuple[Array, Array]) -> Array:
    """Marks the ranks up to the last one, (value, id)."""
    value, token = last[0][:, None], last[1][:, None]
    return (values > value) | ((values == value) & (ids <= token))


def _last(
    order: UInt[Array, "1 vocab"],
    ids: Int32[Array, "1 vocab"],
    top: UInt[Array, " 1"],
    digits: Mass,
    bits: int,
    target: Mass,
) -> tuple[UInt[Array, " 1"], Int32[Array, " 1"]]:
    """Finds the rank at which the mass of all ranks so far reaches the target.

    First its value is found, then its id among the tokens that share the value. Each
    step halves what is left, so there are at most as many passes over the row as a
    float has bits, plus those of its ties.
    """

    def enough(kept: Array) -> Array:
        kept_digits = tuple(jnp.where(kept, digit, 0) for digit in digits)
        return _reaches(_total(kept_digits, bits), target)

    def largest(passes: Callable[[Array], Array], low: Array, high: Array) -> Array:
        def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            yes = passes(middle)
            return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

        def apart(bounds: tuple[Array, Array]) -> Array:
            return jnp.any(bounds[1] - bounds[0] > 1)

        return lax.while_loop(apart, halve, (low, high))[0]

    value = largest(
        lambda value: enough(order >= value[:, None]), jnp.zeros_like(top), top + 1
    )
    equal = order == value[:, None]
    first_id = jnp.min(jnp.where(equal, ids, ids.size), axis=1)
    last_id = jnp.max(jnp.where(equal, ids, 0), axis=1)
    left_out = largest(
        lambda left_out: enough(_upto(order, ids, (value, last_id - left_out))),
        jnp.zeros_like(last_id),
        last_id - first_id + 1,
    )
    return value, last_id - left_out


def _for_each(
    pending: Bool[Array, " rows"], one: Callable[[Array], Any], start: Any
) -> Any:
    """Replaces the pending rows of `start` by what `one` makes of each row number.

    One row at a time: what it costs, and to the last bit what it gives, is then the
    row's own affair.
    """

    def step(state: tuple[Array, Any]) -> tuple[Array, Any]:
        pending, result = state
        row = jnp.argmax(pending)
        result = jax.tree.map(
            lambda all_rows, new: lax.dynamic_update_slice_in_dim(
                all_rows, new, row, axis=0
            ),
            result,
            one(row),
        )
        return pending.at[row].set(False), result

    return lax.while_loop(lambda state: jnp.any(state[0]), step, (pending, start))[1]


def _row(tree: Any, row: Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), tree)


def keep(
    logits: Float[Array, "rows vocab"],
    params: Params,
    *,
    max_candidates: int = MAX_CANDIDATES,
) -> Bool[Array, "rows vocab"]:
    """Marks the tokens that a draw may return.

    Args:
      logits: next-token logits, penalties already applied.
      params: `temperature`, `top_k`, `top_p` and `min_p` are read.
      max_candidates: best tokens among which cut-offs are settled first, at least 1,
        static. It changes what a row costs, never what it keeps.

    Returns:
      The mask. A greedy row keeps one token, a row with a NaN none, and no row one at
      -inf.

    Raises:
      ValueError: `max_candidates` is below 1.
    """
    logits = _wide(logits)
    vocab = logits.shape[1]
    top, greedy = _argmax(logits)
    invalid = _invalid(logits, top)
    wanted = _is_cut(params, vocab) & (params.temperature > 0) & ~invalid

    def search() -> Cut:
        values, ids = _candidates(logits, max_candidates)
        kept, settled = _settle(logits, top, values, params, wanted)
        last = jnp.minimum(kept, values.shape[1])[:, None] - 1
        cut = Cut(
            jnp.take_along_axis(values, last, axis=1)[:, 0],
            jnp.take_along_axis(ids, last, axis=1)[:, 0],
        )
        return _for_each(
            wanted & ~settled,
            lambda row: _exact_cut(*_row((logits, top, params), row)),
            cut,
        )

    nothing = Cut(jnp.full_like(top, -jnp.inf), jnp.full_like(greedy, vocab))
    cut = lax.cond(jnp.any(wanted), search, lambda: nothing)
    cut = jax.tree.map(lambda a, b: jnp.where(wanted, a, b), cut, nothing)
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    mask = _upto(logits, ids, cut) & _above_min_p(_scaled(logits, top, params), params)
    mask = jnp.where((params.temperature > 0)[:, None], mask, ids == greedy[:, None])
    return mask & (logits > -jnp.inf) & ~invalid[:, None]


# Drawing


class Draw(NamedTuple):
    """The tokens drawn for the rows."""

    token: Int32[Array, " rows"]
    """The token; 0 where the row is invalid."""
    logprob: Float[Array, " rows"]
    """Its log-probability under the raw logits; 0 where it was not asked for."""
    invalid: Bool[Array, " rows"]
    """Rows from which nothing can be drawn: NaN among the logits, or all of them
    -inf."""


def sample(
    logits: Float[Array, "rows vocab"],
    params: Params,
    positions: Int32[Array, " rows"],
    *,
    raw: Float[Array, "rows vocab"] | None = None,
    scored: Bool[Array, " rows"] | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> Draw:
    """Draws one token for each row, by Gumbel-max over the tokens that are kept.

    Rows at temperature 0 take the largest logit, the lowest id among equals. A batch of
    such rows skips noise and cut-offs: it looks for the largest logit and for NaN. Give
    unused rows temperature 0, and `scored` False, so that they cost no more.

    Args:
      logits: next-token logits, penalties and other changes already applied.
      params: everything but the penalties is read.
      positions: where the drawn tokens will stand in their sequences.
      raw: the model's own logits, from which log-probabilities are taken, before
        penalties, temperature and cut-offs; None means `logits`.
      scored: rows that want a log-probability; None means all.
      max_candidates: as in `keep`.

    Returns:
      Tokens, log-probabilities, and which rows had nothing to draw from.

    Source: Maddison et al. 2014, arXiv:1411.0030 (Gumbel-max); Fan et al. 2018,
    arXiv:1805.04833 (top-k); Holtzman et al. 2020, arXiv:1904.09751 (top-p); Nguyen et
    al. 2025, arXiv:2407.01082 (min-p).
    """
    raw = logits if raw is None else raw
    logits = _wide(logits)
    vocab = logits.shape[1]
    top, greedy = _argmax(logits)
    invalid = _invalid(logits, top)
    drawn = (params.temperature > 0) & ~invalid
    cut = drawn & _is_cut(params, vocab)

    def draw() -> Array:
        keys = draw_key(params.key, params.sample, positions, SAMPLE)
        token = lax.cond(
            jnp.any(drawn & ~cut),
            lambda: _argmax(logits, _score(top, params, keys))[1],
            lambda: greedy,
        )
        token = lax.cond(
            jnp.any(cut),
            lambda: jnp.where(
                cut, _draw_cut(logits, top, params, keys, cut, max_candidates), token
            ),
            lambda: token,
        )
        return jnp.where(drawn, token, greedy)

    token = lax.cond(jnp.any(drawn), draw, lambda: greedy)
    token = jnp.where(invalid, 0, token)
    if scored is None:
        return Draw(token, token_logprobs(raw, token), invalid)
    nothing = jnp.zeros_like(top, _wide(raw[:, 0]).dtype)
    logprob = lax.cond(
        jnp.any(scored), lambda: token_logprobs(raw, token), lambda: nothing
    )
    return Draw(token, jnp.where(scored, logprob, 0), invalid)


def _score(top: Array, params: Params, keys: Array, cut: Cut | None = None) -> Score:
    """Perturbed log-probabilities, -inf for tokens that are not kept."""

    def score(logits: Array, ids: Array) -> Array:
        scaled = _scaled(logits, top, params)
        kept = _above_min_p(scaled, params)
        if cut is not None:
            kept &= _upto(logits, ids, cut)
        noise = gumbel(keys, ids, logits.dtype)
        return jnp.where(kept, scaled + noise, -jnp.inf)

    return score


def _draw_cut(
    logits: Float[Array, "rows vocab"],
    top: Float[Array, " rows"],
    params: Params,
    keys: UInt32[Array, "rows 2"],
    wanted: Bool[Array, " rows"],
    max_candidates: int,
) -> Int32[Array, " rows"]:
    """Draws for rows under top-k or top-p.

    The best tokens do where they settle the cut-offs, else the whole row is searched.
    """
    values, ids = _candidates(logits, max_candidates)
    kept, settled = _settle(logits, top, values, params, wanted)
    scores = _score(top, params, keys)(values, ids)
    place = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
    scores = jnp.where(place < kept[:, None], scores, -jnp.inf)
    token = _first(scores == jnp.max(scores, axis=1, keepdims=True), ids)

    def one(row: Array) -> Array:
        row_logits, *rest = _row((logits, top, params, keys), row)
        cut = _exact_cut(row_logits, *rest[:2])
        return _argmax(row_logits, _score(*rest, cut))[1]

    return _for_each(wanted & ~settled, one, token)


# Log-probabilities


def _logprobs(
    logits: Float[Array, "rows vocab"], values: Float[Array, "rows n"]
) -> Float[Array, "rows n"]:
    """Log-probabilities of tokens whose logits are `values`."""
    top, bits = jnp.max(logits, axis=1), _digit_bits(logits.shape[1])

    def over(some: Array) -> Array:
        # 0 also where both are +inf.
        return jnp.where(some == top[:, None], 0, some - top[:, None])

    first, *rest = _total(_digits(jnp.exp(over(logits)), bits), bits)
    # Without the largest weight, a 1: log1p is exact where that is almost all there is.
    others = _number((first - (1 << bits), *rest), bits, logits.dtype)
    result = over(values) - jnp.log1p(others)[:, None]
    return jnp.where(_invalid(logits, top)[:, None], jnp.nan, result)


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]
) -> Float[Array, " rows"]:
    """Log-probabilities of given tokens.

    Args:
      logits: next-token logits.
      tokens: a token for each row, in [0, vocab).

    Returns:
      Natural logarithms, NaN where a row holds NaN or nothing but -inf.
    """
    logits = _wide(logits)
    values = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    return _logprobs(logits, values)[:, 0]


def top_logprobs(
    logits: Float[Array, "rows vocab"], max_logprobs: int
) -> tuple[Int32[Array, "rows {max_logprobs}"], Float[Array, "rows {max_logprobs}"]]:
    """The most likely tokens of each row and their log-probabilities, best first.

    Args:
      logits: next-token logits.
      max_logprobs: how many, in [1, vocab], static.

    Returns:
      Token ids, lower ones first among equals; natural logarithms, NaN as in
      `token_logprobs`.

    Raises:
      ValueError: `max_logprobs` is out of range.
    """
    if not 1 <= max_logprobs <= logits.shape[1]:
        raise ValueError(f"{max_logprobs=} must be in [1, {logits.shape[1]}]")
    logits = _wide(logits)
    values, ids = _candidates(logits, max_logprobs)
    return ids, _logprobs(logits, values)
