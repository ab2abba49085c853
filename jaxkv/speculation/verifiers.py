"""Which drafts are accepted, and which token follows the last of them.

  Coupled    the model draws by the noise it draws by anyway; a draft is accepted if it
             is that token. Keeps every token
  Rejection  a draft is accepted as often as the model's law allows, and what follows
             makes up for the rest. Keeps the law
  Typical    a draft is accepted if it is not too unlikely. Keeps neither
  Synthetic  a draft is accepted as often as is said. For measuring

A greedy row takes its largest logit under each of them. As in `sampler`, a row's ruling
depends on that row alone, and a batch of greedy rows skips what only others need.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, validation
from jaxkv.engine.drafting import Ruling
from jaxkv.sampling import Params, fixed_point, random_keys, sampler, top_k
from jaxkv.speculation import draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coupled:
    """Accepts a draft if it is the token that plain decoding would draw.

    A token's noise is a function of its request and position alone, so the token that
    `sampler.sample` draws is the same whether anybody guessed it or not: sampled tokens
    come out as without speculation, not only under the same law. A draft is accepted
    less often than by `Rejection`, unless the drafter draws by the same noise.
    """

    @property
    def is_lossless(self) -> bool:
        """True."""
        return True

    @property
    def shares_noise(self) -> bool:
        """True: drafts may depend on its draws, see `Drafter.reuses_draws`."""
        return True

    def __call__(
        self,
        logits: Float[Array, "rows vocab"],
        children: Int32[Array, "rows width"],
        law: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> Ruling:
        """Judges the children of every row; see `drafting.Verifier`. `law` is unread.

        Returns:
          The ruling; what is accepted is certain, or impossible.
        """
        nobody = jnp.zeros(positions.shape, bool)
        drawn = sampler.sample(logits, params, positions, raw=raw, scored=nobody)
        equal = _equal(children, drawn.token, top_k.wide(logits).dtype)
        return _ruling(equal, drawn.token, drawn.invalid)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejection:
    """Accepts drafts at random, so that tokens come out under the model's own law.

    Of p, the law that is wanted, and q, from which a draft x was drawn: x is accepted
    with probability min(1, p(x) / q(x)); after that p is max(0, p - q), normalised, for
    the next child, and in the end for the token that follows.

    Source: Leviathan et al. 2023, arXiv:2211.17192, section 2.3; Chen et al. 2023,
    arXiv:2302.01318, algorithm 2; Miao et al. 2024, arXiv:2305.09781, section 4.3
    (several candidates); Jeon et al. 2024, arXiv:2402.14160 (without replacement).
    """

    replacement: bool = False
    """Whether siblings were drawn with replacement: q is then the same for each of
    them. Otherwise a child that was turned down leaves it. To say False of drafts drawn
    with replacement costs some of them, since equals are passed over, but keeps the
    law; to say True of others does not."""

    def __post_init__(self) -> None:
        """Checks the field.

        Raises:
          ValueError: it is not True or False.
        """
        validation.boolean("replacement", self.replacement)

    @property
    def is_lossless(self) -> bool:
        """True."""
        return True

    def __call__(
        self,
        logits: Float[Array, "rows vocab"],
        children: Int32[Array, "rows width"],
        law: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> Ruling:
        """Judges the children of every row; see `drafting.Verifier`.

        Returns:
          The ruling. The children of a greedy row are compared, whatever their law.
        """
        logits = top_k.wide(logits)
        greedy = sampler.greedy(logits, raw=raw)
        warm = params.temperature > 0
        equal = _equal(children, greedy.token, logits.dtype)

        def judge() -> tuple[Array, Array]:
            target = sampler.probabilities(logits, params)
            accept, rest = self.rule(target, law, children)
            keys = random_keys.draw_key(
                params.key, params.sample, positions, random_keys.RESIDUAL
            )
            token = draws.pick(rest, keys)[:, 0]
            return (
                jnp.where(warm[:, None], accept, equal),
                jnp.where(warm, token, greedy.token),
            )

        with jax.named_scope("rejection"):
            found = lax.cond(jnp.any(warm), judge, lambda: (equal, greedy.token))
        return _ruling(*found, greedy.invalid)

    def rule(
        self,
        target: Float[Array, "rows vocab"],
        law: Float[Array, "rows vocab"] | None,
        children: Int32[Array, "rows width"],
    ) -> tuple[Float[Array, "rows width"], Float[Array, "rows vocab"]]:
        """The rule itself, on probabilities.

        A child that its law cannot have drawn is passed over, as is a -1. The law may
        therefore be cut after the drawing: it is then that of the children it keeps.

        Args:
          target: the law that is wanted, p.
          law: that from which the children were drawn, q; None is certain of each in
            turn.
          children: in the order in which they are tried.

        Returns:
          The probability that each child is accepted if those before it were not; and
          the law of the token that follows if none is. Where that is never asked for,
          it is `target`.
        """
        accept, rest = jnp.zeros(children.shape, target.dtype), target
        ids = jnp.arange(target.shape[1], dtype=jnp.int32)[None, :]
        left = None if law is None else law.astype(target.dtype)
        for rank in range(children.shape[1]):
            child = children[:, rank]
            is_child = ids == child[:, None]
            guess = is_child.astype(target.dtype) if left is None else left
            chance, rest = _try(rest, guess, child)
            accept = accept.at[:, rank].set(chance)
            if left is not None and not self.replacement:
                left = fixed_point.normalise(jnp.where(is_child, 0, left))
        return accept, rest


def _try(
    target: Float[Array, "rows vocab"],
    law: Float[Array, "rows vocab"],
    child: Int32[Array, " rows"],
) -> tuple[Float[Array, " rows"], Float[Array, "rows vocab"]]:
    """How likely one child is accepted, and the law that is wanted if it is not."""
    at = (jnp.arange(target.shape[0], dtype=jnp.int32), child)
    wanted, guessed = (arrays.take(x, at, fill=0) for x in (target, law))
    tried = guessed > 0
    ratio = wanted / jnp.where(tried, guessed, jnp.ones_like(guessed))
    chance = jnp.where(tried, jnp.minimum(ratio, 1), 0)
    rest = fixed_point.normalise(jnp.maximum(target - law, 0))
    # No mass is left where the laws are equal: then nothing was turned down.
    changed = tried & (jnp.max(rest, axis=1) > 0)
    return chance, jnp.where(changed[:, None], rest, target)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Typical:
    """Accepts a draft that is not too unlikely: the law is not the model's own.

    A draft's probability must exceed min(epsilon, delta exp(-H)), H the entropy of the
    law in nats. Nothing is random about it, and the first child that passes is taken.
    The token that follows is drawn as in plain decoding.

    Source: Cai et al. 2024, arXiv:2401.10774, "Typical acceptance"; the defaults are
    those of its code. There the longest accepted path is taken instead.
    """

    epsilon: float = 0.09
    """Probability above which every draft is accepted, in (0, 1]."""
    delta: float = 0.3
    """What scales the bound where the law is spread out, in (0, 1]."""

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
          ValueError: one is out of its range; the message shows it.
        """
        for name in ("epsilon", "delta"):
            bounds = {"low": math.ulp(0.0), "high": 1.0, "hint": "in (0, 1]"}
            value = validation.number(name, getattr(self, name), **bounds)
            object.__setattr__(self, name, value)

    @property
    def is_lossless(self) -> bool:
        """False."""
        return False

    def __call__(
        self,
        logits: Float[Array, "rows vocab"],
        children: Int32[Array, "rows width"],
        law: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> Ruling:
        """Judges the children of every row; see `drafting.Verifier`. `law` is unread.

        Returns:
          The ruling; what is accepted is certain, or impossible.
        """
        logits = top_k.wide(logits)
        warm = params.temperature > 0
        nobody = jnp.zeros(positions.shape, bool)
        drawn = sampler.sample(logits, params, positions, raw=raw, scored=nobody)
        equal = _equal(children, drawn.token, logits.dtype)

        def judge() -> Array:
            accept = self.rule(sampler.probabilities(logits, params), children)
            return jnp.where(warm[:, None], accept, equal)

        with jax.named_scope("typical"):
            accept = lax.cond(jnp.any(warm), judge, lambda: equal)
        return _ruling(accept, drawn.token, drawn.invalid)

    def rule(
        self,
        target: Float[Array, "rows vocab"],
        children: Int32[Array, "rows width"],
    ) -> Float[Array, "rows width"]:
        """The rule itself, on probabilities: 1 for children that pass, 0 for others."""
        entropy = fixed_point.row_sums(target * -_log(target))
        bound = jnp.minimum(math.log(self.epsilon), math.log(self.delta) - entropy)
        row = jnp.arange(target.shape[0], dtype=jnp.int32)[:, None]
        row = jnp.broadcast_to(row, children.shape)
        wanted = arrays.take(target, (row, children), fill=0)
        passes = (wanted > 0) & (_log(wanted) > bound[:, None])
        return passes.astype(target.dtype)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accepts any draft with a given probability: to measure what acceptance is worth.

    The token that follows is drawn as in plain decoding; what comes out is no answer.
    """

    acceptance: float
    """In [0, 1], of each draft by itself."""

    def __post_init__(self) -> None:
        """Checks the field.

        Raises:
          ValueError: it is out of its range; the message shows it.
        """
        value = validation.number(
            "acceptance", self.acceptance, low=0.0, high=1.0, hint="in [0, 1]"
        )
        object.__setattr__(self, "acceptance", value)

    @property
    def is_lossless(self) -> bool:
        """False."""
        return False

    def __call__(
        self,
        logits: Float[Array, "rows vocab"],
        children: Int32[Array, "rows width"],
        law: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> Ruling:
        """Judges the children of every row, without a look at them."""
        nobody = jnp.zeros(positions.shape, bool)
        drawn = sampler.sample(logits, params, positions, raw=raw, scored=nobody)
        accept = jnp.where(children >= 0, self.acceptance, 0.0).astype(jnp.float32)
        return _ruling(accept, drawn.token, drawn.invalid)


def _log(numbers: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """Logarithms of numbers in [0, 1], finite: as if those near 0 were further away.

    By log1p, which rounds alike in every batch; XLA's CPU log does not.
    """
    some = jnp.maximum(numbers, jnp.finfo(numbers.dtype).tiny)
    return -jnp.log1p((1 - some) / some)


def _equal(
    children: Int32[Array, "rows width"],
    token: Int32[Array, " rows"],
    dtype: jnp.dtype,
) -> Float[Array, "rows width"]:
    """1 for children that are the token, 0 for others."""
    return (children == token[:, None]).astype(dtype)


def _ruling(
    accept: Float[Array, "rows width"],
    token: Int32[Array, " rows"],
    invalid: Bool[Array, " rows"],
) -> Ruling:
    """The ruling, in which nothing follows invalid rows."""
    none = jnp.zeros_like(accept)
    return Ruling(
        accept=jnp.where(invalid[:, None], none, accept),
        token=jnp.where(invalid, 0, token),
        invalid=invalid,
    )
