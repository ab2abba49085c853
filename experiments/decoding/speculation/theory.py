"""What speculation gains by formula, where drafts are accepted independently.

`IndependentDrafts` holds the counts of such drafts, with the formula.

Source: Leviathan et al. 2023, arXiv:2211.17192, equations 1 and theorem 3.11.
"""

import numpy as np
from jaxtyping import Float

from experiments.framework import Floats, Ints, Table, column
from experiments.framework.table import shown


def tokens_per_step(acceptance: float, num_drafts: int) -> float:
    """Tokens that a step gives: (1 - a^(g + 1)) / (1 - a), which is 1 + a + ... + a^g.

    0.8 and 5 drafts give 3.69. Acceptance is in [0, 1].
    """
    return float(sum(acceptance**k for k in range(num_drafts + 1)))


def operations_per_token(
    acceptance: float, num_drafts: int, cost: float = 0.0
) -> float:
    """Operations of a token over those of plain decoding.

    0.8 and 5 drafts that cost nothing take 1.63 times as many.

    Args:
      acceptance: of a draft, in [0, 1].
      num_drafts: in a step.
      cost: operations of a draft over those of a token of the model.
    """
    fed = num_drafts * cost + num_drafts + 1
    return fed / tokens_per_step(acceptance, num_drafts)


def expected_tokens(
    acceptance: Float[np.ndarray, " rows"], num_drafts: np.ndarray
) -> Float[np.ndarray, " rows"]:
    """Tokens of a step for every row of a table."""
    pairs = zip(acceptance.tolist(), num_drafts.tolist(), strict=True)
    return np.array([tokens_per_step(*pair) for pair in pairs])


def token_deviation(
    acceptance: Float[np.ndarray, " rows"], num_drafts: np.ndarray
) -> Float[np.ndarray, " rows"]:
    """The standard deviation of a step's tokens for every row of a table.

    k drafts pass with a^k, so that squares sum to 1 + 3 a + 5 a^2 + ...
    """
    found = []
    for a, num in zip(acceptance.tolist(), num_drafts.tolist(), strict=True):
        square = sum((2 * k + 1) * a**k for k in range(num + 1))
        found.append(max(0.0, square - tokens_per_step(a, num) ** 2) ** 0.5)
    return np.array(found)


class IndependentDrafts(Table):
    """Steps whose drafts were accepted with one chance, each by itself."""

    acceptance: Floats = column("chance of each draft")
    num_drafts: Ints = column("in a step", heading="drafts")
    steps: Ints = column("that fed as many, of all sequences")
    emitted: Ints = column("tokens that they gave", is_told=False)

    @property
    @shown(heading="tokens a step", form="{:.3f}")
    def tokens_per_step(self) -> np.ndarray:
        """As measured."""
        return self.emitted / np.maximum(self.steps, 1)

    @property
    @shown(heading="by formula", form="{:.3f}")
    def expected(self) -> np.ndarray:
        """As they should be: (1 - a^(g + 1)) / (1 - a)."""
        return expected_tokens(self.acceptance, self.num_drafts)

    @property
    def chance_error(self) -> np.ndarray:
        """Standard error of as many steps' tokens, by the formula."""
        spread = token_deviation(self.acceptance, self.num_drafts)
        return spread / np.sqrt(np.maximum(self.steps, 1))
