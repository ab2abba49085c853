"""Drafts accepted by coins: what both studies count of them, beside the formula."""

import numpy as np

from experiments.decoding.speculation import theory
from experiments.framework import Floats, Ints, Table, column
from experiments.framework.table import shown


class Tossed(Table):
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
        return theory.tokens_of(self.acceptance, self.num_drafts)

    @property
    def chance_error(self) -> np.ndarray:
        """Standard error of as many steps' tokens, by the formula."""
        spread = theory.spread_of(self.acceptance, self.num_drafts)
        return spread / np.sqrt(np.maximum(self.steps, 1))
