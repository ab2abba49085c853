"""What `jaxkv plan` finds: the optimum, how sure it is, and designs that come near."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from scaling.costs.memory import Memory, training
from scaling.laws import Optimum
from scaling.plan import Bill, Case, Design, budgets, designs, spread
from scaling.plan.spread import Spread


class Found(NamedTuple):
    """What is found for a case.

    Attributes:
      case: which.
      free: the optimum if nothing is served and no data repeats.
      optimum: the optimum.
      searched: its parameters, by a search along the budget's curve.
      equal: as good as `free`, and cheapest to train and serve.
      confidence: interval of the law's loss at the optimum, if there is one.
      prediction: the same of a run.
      spread: of the optimum's parameters and tokens, for a fit with resamples.
      design: the nearest to the optimum's parameters.
      design_tokens: that the budget trains it on with every operation counted; 0 where
        serving takes all.
      exact: of all designs the best, its tokens and loss, every operation counted.
      memory: of training the design on one device.
    """

    case: Case
    free: Optimum
    optimum: Optimum
    searched: float
    equal: Optimum
    confidence: tuple[float, float] | None
    prediction: tuple[float, float] | None
    spread: Spread | None
    design: Design
    design_tokens: float
    exact: tuple[Design, float, float]
    memory: Memory

    @property
    def tokens_per_param(self) -> float:
        """Of the optimum."""
        return self.optimum.num_tokens / self.optimum.num_params

    @property
    def training(self) -> Bill:
        """What training the optimum takes, 6 N D."""
        return self.case.bill(6 * self.optimum.num_params * self.optimum.num_tokens)

    @property
    def exact_training(self) -> Bill:
        """What training the design takes, every operation counted."""
        return self.case.bill(self.design.flops_per_token * self.optimum.num_tokens)

    @property
    def division(self) -> tuple[int | None, float | None]:
        """How many devices train the optimum for how many seconds, if that is given."""
        return self.case.division(self.training.device_s)

    @property
    def off(self) -> float:
        """By which share the design has more parameters than the optimum."""
        return self.design.num_params / self.optimum.num_params - 1

    @property
    def design_loss(self) -> float | None:
        """The design's, where the budget trains it at all."""
        if not self.design_tokens:
            return None
        return float(self.case.loss(float(self.design.num_params), self.design_tokens))

    @property
    def min_devices(self) -> int | None:
        """Devices whose memory together holds a training step of one sequence."""
        offer = self.case.offer
        if offer is None or offer.memory_bytes is None:
            return None
        return math.ceil(self.memory.total / offer.memory_bytes)

    @property
    def saved(self) -> float:
        """The share of `free`'s operations, with serving, that `equal` saves."""
        equal, free = map(self.operations, (self.equal, self.free))
        return 1 - equal / free

    def operations(self, model: Optimum) -> float:
        """What training and serving a model takes together."""
        return budgets.operations(model.num_params, model.num_tokens, self.case.served)


def find(case: Case) -> Found:
    """Finds the optimum, its interval, and designs.

    Raises:
      ValueError: the budget is too small or too large for any design.
    """
    powers, flops, family = case.belief.powers, case.flops, case.family
    free, optimum = budgets.allocate(powers, flops), case.allocate()
    try:
        design = designs.nearest(family, optimum.num_params)
    except ValueError as error:
        raise _refusal(case, error, _other_vocabulary(case, optimum)) from None
    try:
        exact = designs.best(family, case.loss, flops, inference_tokens=case.served)
    except ValueError as error:
        raise _refusal(case, error, "; a smaller --sequence might do") from None
    left = flops / design.flops_per_token - case.served / 3
    return Found(
        case=case,
        free=free,
        optimum=optimum,
        searched=budgets.search(powers, flops, case.served, case.repeating),
        equal=budgets.cheapest(powers, free.loss, inference_tokens=case.served),
        confidence=spread.of_loss(case, optimum, "confidence"),
        prediction=spread.of_loss(case, optimum, "prediction"),
        spread=spread.of_optimum(case, optimum),
        design=design,
        design_tokens=max(left, 0.0),
        exact=exact,
        memory=training(
            design.model, sequence=family.sequence, checkpointing="boundary"
        ),
    )


def _refusal(case: Case, error: ValueError, way_out: str) -> ValueError:
    limits = ""
    if case.unique_tokens is not None:
        limits += f" and {case.unique_tokens:.4g} unique tokens"
    if case.served:
        limits += f" with {case.served:.4g} tokens to serve"
    target = case.target_loss
    aim = "" if target is None else f"--target-loss {target:g}: "
    said = f"a budget of {case.flops:.4g} FLOPs{limits} is {error}{way_out}"
    return ValueError(aim + said)


def _other_vocabulary(case: Case, optimum: Optimum) -> str:
    """Says which vocabularies have designs small enough, or whose it is."""
    size = case.family.vocab_size
    most = designs.max_vocab_size(case.family, optimum.num_params)
    if most is None or not 1 <= most < size:
        return ""
    if size == case.belief.shape.get("vocab_size"):
        return f", that of the runs behind {case.belief.name}"
    return f"; with --vocab-size in [1, {most:,}] there are smaller ones"


def warnings(found: Found) -> Iterator[str]:
    """Doubts about a plan, in words."""
    case, belief, fit = found.case, found.case.belief, found.case.belief.fit
    if fit is not None:
        yield from belief.doubts
        yield from (f"{belief.law.name}: {line}" for line in fit.warnings)
        most = fit.ranges.get("flops", (math.nan, math.nan))[1]
        if found.training.flops > 10 * most:
            yield (
                f"training takes {found.training.flops / most:,.3g} times the "
                "operations of the largest run that was fitted"
            )
    spread = found.spread
    if spread is not None and spread.num_without:
        yield (
            f"{spread.num_without} of {spread.num_resamples} resamples "
            "have no optimum: the intervals of N and D are of the others"
        )
    if case.target_loss is not None and fit is not None:
        if spread is None:
            why = "the fit has no resamples (fit --bootstrap)"
            yield f"the budget has no interval: {why}"
        elif spread.flops is not None and math.isinf(spread.flops[1]):
            yield (
                f"by some resamples no budget reaches a loss of {case.target_loss:g}: "
                "it may be below the floor"
            )
    if belief.count and case.family.count != belief.count:
        yield (
            f"the fit counted {belief.count} parameters, --count is {case.family.count}"
        )
    if case.unique_tokens is not None:
        half, best = case._replace(flops=case.flops / 2).allocate(), found.optimum
        if half.loss - best.loss < 1e-3 * (half.loss - belief.powers.floor):
            yield (
                "the data is used up: half of the budget would reach a loss of "
                f"{half.loss:.4f}, all of it {best.loss:.4f}"
            )
    if abs(found.off) > 0.01:
        yield f"the nearest design is {100 * found.off:+.1f} % off in parameters"
    number, _ = case.division(case.bill(case.flops).device_s)
    needed = found.min_devices
    if number is not None and needed is not None and number < needed:
        yield (
            f"{number} devices cannot hold a training step: it needs {needed} at least"
        )
    if found.design_tokens == 0:
        yield "with every operation counted, serving takes the whole budget"
