"""Verifiers: rules that accept drafts and sample the token after the last accepted one.

  SharedNoiseVerifier  accepts a draft if plain decoding samples that token with the
                       same noise; the output tokens are those of plain decoding
  Rejection            accepts a draft with probability min(1, p/q); the output
                       distribution is that of plain decoding
  Typical              accepts a draft whose probability is above a threshold; changes
                       the output distribution
  Synthetic            accepts a draft with a fixed probability, for measurements

Under every verifier a greedy row takes the token with the largest logit. As in
`sampler`, the result of a row does not depend on other rows, and a batch of greedy rows
skips the computations of sampled rows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, sampling, validation
from jaxkv.engine import AcceptResult
from jaxkv.sampling import RESIDUAL, Params, draw_key, row_sums
from jaxkv.speculation import draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedNoiseVerifier:
    """Accepts a draft if plain decoding would sample the same token.

    The noise of a token depends on its request and position only, so `sampler.sample`
    draws the same token with and without speculation: sampled tokens equal those of
    plain decoding one by one, a stronger property than an equal distribution. The
    acceptance rate is below that of `Rejection`, unless the drafter samples with the
    same noise.
    """

    @property
    def is_lossless(self) -> bool:
        """True."""
        return True

    @property
    def shares_noise(self) -> bool:
        """True: drafts may depend on its samples, see `Drafter.reuses_draws`."""
        return True

    def __call__(
        self,
        logits: Float[Array, "rows vocab"],
        children: Int32[Array, "rows width"],
        draft_probs: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> AcceptResult:
        """Judges the children of every row; see `drafting.Verifier`.

        Returns:
          The ruling; acceptance probabilities are 0 or 1. `draft_probs` is ignored.
        """
        unscored = jnp.zeros(positions.shape, bool)
        draw = sampling.sample(
            logits, params, positions, raw=raw, keep_logprobs=unscored
        )
        equal = _match(children, draw.token, sampling.wide(logits).dtype)
        return _mask_invalid(equal, draw.token, draw.invalid)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejection:
    """Rejection sampling (speculative sampling), which keeps the model's distribution.

    Let p be the target distribution and q the one from which a draft x was sampled. x
    is accepted with probability min(1, p(x) / q(x)). After a rejection p becomes max(0,
    p - q), normalised, for the next child, and finally for the token that replaces the
    drafts.

    Source: Leviathan et al. 2023, arXiv:2211.17192, section 2.3; Chen et al. 2023,
    arXiv:2302.01318, algorithm 2; Miao et al. 2024, arXiv:2305.09781, section 4.3
    (several candidates); Jeon et al. 2024, arXiv:2402.14160 (without replacement).
    """

    replacement: bool = False
    """True if siblings were sampled with replacement, so that q is equal for all of
    them. If False, a rejected child is removed from q. False for drafts sampled with
    replacement lowers the acceptance rate, since duplicates are skipped, but keeps the
    distribution; True for drafts sampled without replacement does not keep it."""

    def __post_init__(self) -> None:
        """Validates the field.

        Raises:
          ValueError: `replacement` is not a boolean.
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
        draft_probs: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> AcceptResult:
        """Judges the children of every row; see `drafting.Verifier`.

        Returns:
          The ruling. Children of a greedy row are compared with the largest logit.
        """
        logits = sampling.wide(logits)
        greedy = sampling.greedy(logits, raw=raw)
        warm = params.temperature > 0
        equal = _match(children, greedy.token, logits.dtype)

        def judge() -> tuple[Array, Array]:
            target_probs = sampling.probabilities(logits, params)
            accept, residual = self.rule(target_probs, draft_probs, children)
            keys = draw_key(params.key, params.sample, positions, RESIDUAL)
            token = draws.gumbel_top_k(residual, keys)[:, 0]
            return (
                jnp.where(warm[:, None], accept, equal),
                jnp.where(warm, token, greedy.token),
            )

        with jax.named_scope("rejection"):
            ruling = lax.cond(jnp.any(warm), judge, lambda: (equal, greedy.token))
        return _mask_invalid(*ruling, greedy.invalid)

    def rule(
        self,
        target_probs: Float[Array, "rows vocab"],
        draft_probs: Float[Array, "rows vocab"] | None,
        children: Int32[Array, "rows width"],
    ) -> tuple[Float[Array, "rows width"], Float[Array, "rows vocab"]]:
        """Computes acceptance probabilities and the residual distribution.

        A child with draft probability 0, or of id -1, is skipped. A draft distribution
        may therefore be truncated after sampling, as long as it contains the children
        that remain.

        Args:
          target_probs: target distribution p.
          draft_probs: distribution q of the children; None means that each child was
            chosen deterministically.
          children: token ids, in the order in which they are tried.

        Returns:
          The probability that each child is accepted if those before it were rejected,
          and the distribution of the next token if all are rejected; where rejection of
          all is impossible, `target_probs`.
        """
        dtype = target_probs.dtype
        accept = jnp.zeros(children.shape, dtype)
        residual = target_probs
        ids = jnp.arange(target_probs.shape[1], dtype=jnp.int32)[None, :]
        left = None if draft_probs is None else draft_probs.astype(dtype)
        for rank in range(children.shape[1]):
            child = children[:, rank]
            is_child = ids == child[:, None]
            guess = is_child.astype(dtype) if left is None else left
            chance, residual = _try_child(residual, guess, child)
            accept = accept.at[:, rank].set(chance)
            if left is not None and not self.replacement:
                left = sampling.normalise(jnp.where(is_child, 0, left))
        return accept, residual


def _try_child(
    target_probs: Float[Array, "rows vocab"],
    draft_probs: Float[Array, "rows vocab"],
    child: Int32[Array, " rows"],
) -> tuple[Float[Array, " rows"], Float[Array, "rows vocab"]]:
    """Returns the acceptance probability of a child, and the residual distribution."""
    at = (jnp.arange(target_probs.shape[0], dtype=jnp.int32), child)
    p, q = (arrays.take(x, at, fill=0) for x in (target_probs, draft_probs))
    tried = q > 0
    ratio = p / jnp.where(tried, q, jnp.ones_like(q))
    chance = jnp.where(tried, jnp.minimum(ratio, 1), 0)
    residual = sampling.normalise(jnp.maximum(target_probs - draft_probs, 0))
    # Equal distributions leave no mass, and a rejection is impossible then.
    changed = tried & (jnp.max(residual, axis=1) > 0)
    return chance, jnp.where(changed[:, None], residual, target_probs)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Typical:
    """Typical acceptance: accepts a draft whose probability exceeds a threshold.

    The threshold is min(epsilon, delta exp(-H)), with H the entropy of the target
    distribution in nats. Acceptance is deterministic, and the first child above the
    threshold is taken. The next token is sampled as in plain decoding. The output
    distribution differs from the model's.

    Source: Cai et al. 2024, arXiv:2401.10774, "Typical acceptance"; the defaults are
    those of its code, which takes the longest accepted path instead.
    """

    epsilon: float = 0.09
    """Probability above which every draft is accepted, in (0, 1]."""
    delta: float = 0.3
    """Scale of the entropy-dependent threshold, in (0, 1]."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a field is out of its range; the message shows it.
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
        draft_probs: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> AcceptResult:
        """Judges the children of every row; see `drafting.Verifier`.

        Returns:
          The ruling; acceptance probabilities are 0 or 1. `draft_probs` is ignored.
        """
        logits = sampling.wide(logits)
        warm = params.temperature > 0
        unscored = jnp.zeros(positions.shape, bool)
        draw = sampling.sample(
            logits, params, positions, raw=raw, keep_logprobs=unscored
        )
        equal = _match(children, draw.token, logits.dtype)

        def judge() -> Array:
            accept = self.rule(sampling.probabilities(logits, params), children)
            return jnp.where(warm[:, None], accept, equal)

        with jax.named_scope("typical"):
            accept = lax.cond(jnp.any(warm), judge, lambda: equal)
        return _mask_invalid(accept, draw.token, draw.invalid)

    def rule(
        self,
        target_probs: Float[Array, "rows vocab"],
        children: Int32[Array, "rows width"],
    ) -> Float[Array, "rows width"]:
        """Returns 1 for children with a probability above the threshold, else 0."""
        entropy = row_sums(target_probs * -_log(target_probs))
        bound = jnp.minimum(math.log(self.epsilon), math.log(self.delta) - entropy)
        row = jnp.arange(target_probs.shape[0], dtype=jnp.int32)[:, None]
        row = jnp.broadcast_to(row, children.shape)
        probs = arrays.take(target_probs, (row, children), fill=0)
        passes = (probs > 0) & (_log(probs) > bound[:, None])
        return passes.astype(target_probs.dtype)


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accepts every draft with a fixed probability, for measurements of speed.

    The next token is sampled as in plain decoding; the output is not a valid answer.
    """

    acceptance: float
    """Acceptance rate in [0, 1], applied to each draft independently."""

    def __post_init__(self) -> None:
        """Validates the field.

        Raises:
          ValueError: `acceptance` is out of its range; the message shows it.
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
        draft_probs: Float[Array, "rows vocab"] | None,
        params: Params,
        positions: Int32[Array, " rows"],
        raw: Float[Array, "rows vocab"],
    ) -> AcceptResult:
        """Accepts the children of every row with the fixed probability."""
        unscored = jnp.zeros(positions.shape, bool)
        draw = sampling.sample(
            logits, params, positions, raw=raw, keep_logprobs=unscored
        )
        accept = jnp.where(children >= 0, self.acceptance, 0.0).astype(jnp.float32)
        return _mask_invalid(accept, draw.token, draw.invalid)


def _log(numbers: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """Returns finite logarithms of numbers in [0, 1]; numbers near 0 are clipped.

    Uses log1p, whose rounding on a CPU does not depend on the batch; XLA's log does.
    """
    positive = jnp.maximum(numbers, jnp.finfo(numbers.dtype).tiny)
    return -jnp.log1p((1 - positive) / positive)


def _match(
    children: Int32[Array, "rows width"],
    token: Int32[Array, " rows"],
    dtype: jnp.dtype,
) -> Float[Array, "rows width"]:
    """Returns 1 for children equal to the token, and 0 otherwise."""
    return (children == token[:, None]).astype(dtype)


def _mask_invalid(
    accept: Float[Array, "rows width"],
    token: Int32[Array, " rows"],
    invalid: Bool[Array, " rows"],
) -> AcceptResult:
    """Returns the ruling with acceptance 0 and token 0 in invalid rows."""
    none = jnp.zeros_like(accept)
    return AcceptResult(
        accept=jnp.where(invalid[:, None], none, accept),
        token=jnp.where(invalid, 0, token),
        invalid=invalid,
    )
