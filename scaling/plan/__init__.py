"""Plans: from a budget and a law to model size, tokens and price."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.plan.budgets import (
        DataLimit,
        HalfLives,
        allocate_budget,
        budget_loss,
        cheapest_model,
        law_two_powers,
        lifetime_flops,
        needed_budget,
        search_params,
        tokens_left,
    )
    from scaling.plan.case import LossModel, PlanCase, TrainingCost, make_loss_model
    from scaling.plan.designs import (
        Count,
        Design,
        DesignFamily,
        best_design,
        design_ladder,
        max_vocab_size,
        nearest_design,
    )
    from scaling.plan.lifetime import (
        CostOptimum,
        CostSpread,
        ServingLadder,
        closed_form_ladder,
        ladder_cost,
        tokens_for_loss,
        total_cost,
        total_cost_spread,
    )
    from scaling.plan.next_runs import RunChoice, choose_next_runs, evidence_variance
    from scaling.plan.pricing import DAY_S, HOUR_S, Offer, best_offer, parse_offer
    from scaling.plan.spread import OptimumSpread, loss_interval, optimum_spread

__all__, __getattr__, __dir__ = lazy_exports(__name__)
