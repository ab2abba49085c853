"""Theoretical speed-up of speculation with independent acceptance.

`IndependentDrafts` holds counts of such drafts with the formula.

Source: Leviathan et al. 2023, arXiv:2211.17192, equations 1 and theorem 3.11.
"""

import numpy as np
from jaxtyping import Float

from experiments import lab


def tokens_per_step(acceptance: float, num_drafts: int) -> float:
    """Returns tokens per step: (1 - a^(g + 1)) / (1 - a) = 1 + a + ... + a^g.

    Acceptance rate 0.8 with 5 drafts gives 3.69. `acceptance` is in [0, 1].
    """
    return float(sum(acceptance**k for k in range(num_drafts + 1)))


def operations_per_token(
    acceptance: float, num_drafts: int, cost: float = 0.0
) -> float:
    """Returns operations per token over those of plain decoding.

    Acceptance rate 0.8 with 5 drafts at no cost gives 1.63.

    Args:
      acceptance: acceptance rate of a draft token, in [0, 1].
      num_drafts: draft length.
      cost: operations of a draft token over those of a token of the model.
    """
    fed = num_drafts * cost + num_drafts + 1
    return fed / tokens_per_step(acceptance, num_drafts)


def expected_tokens(
    acceptance: Float[np.ndarray, " rows"], num_drafts: np.ndarray
) -> Float[np.ndarray, " rows"]:
    """Returns tokens per step for every row of a table."""
    pairs = zip(acceptance.tolist(), num_drafts.tolist(), strict=True)
    return np.array([tokens_per_step(*pair) for pair in pairs])


def token_deviation(
    acceptance: Float[np.ndarray, " rows"], num_drafts: np.ndarray
) -> Float[np.ndarray, " rows"]:
    """Returns the standard deviation of tokens per step for every row of a table.

    k draft tokens are accepted with probability a^k, so that the second moment is
    1 + 3 a + 5 a^2 + ...
    """
    deviations = []
    for a, num in zip(acceptance.tolist(), num_drafts.tolist(), strict=True):
        square = sum((2 * k + 1) * a**k for k in range(num + 1))
        deviations.append(max(0.0, square - tokens_per_step(a, num) ** 2) ** 0.5)
    return np.array(deviations)


class IndependentDrafts(lab.ResultTable):
    """Counts of steps with independent acceptance of draft tokens."""

    acceptance: lab.Floats = lab.column("acceptance rate of a draft token")
    num_drafts: lab.Ints = lab.column("draft length", heading="drafts")
    steps: lab.Ints = lab.column("steps with that draft length")
    emitted: lab.Ints = lab.column("tokens of these steps", is_reported=False)

    @property
    @lab.computed_column(heading="tokens a step", form="{:.3f}")
    def tokens_per_step(self) -> np.ndarray:
        """Measured tokens per step."""
        return self.emitted / np.maximum(self.steps, 1)

    @property
    @lab.computed_column(heading="by formula", form="{:.3f}")
    def expected(self) -> np.ndarray:
        """Expected tokens per step: (1 - a^(g + 1)) / (1 - a)."""
        return expected_tokens(self.acceptance, self.num_drafts)

    @property
    def chance_error(self) -> np.ndarray:
        """Standard error of the mean tokens per step, by formula."""
        spread = token_deviation(self.acceptance, self.num_drafts)
        return spread / np.sqrt(np.maximum(self.steps, 1))
