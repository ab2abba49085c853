"""What `jaxkv plan` finds: the optimum, how sure it is, and designs that come near."""

import math
from typing import Literal, NamedTuple

import numpy as np

from experiments.cli.plan.case import Case, believe, device_seconds, division
from scaling.costs.memory import Memory, training
from scaling.fits import intervals
from scaling.fits.fit import predict
from scaling.laws import Optimum
from scaling.plan import Design, budgets, designs

_MAX_RESAMPLES = 200
"""Of those that need a search each."""


_NEVER = 2000.0
"""As the logarithm of a budget: more than any."""


class Spread(NamedTuple):
    """Where the optimum lies by the resamples of a fit.

    Attributes:
      params: interval of its parameters.
      tokens: interval of its tokens.
      flops: interval of the budget that reaches the loss that is asked for, with
        infinity where resamples have none that does; None where no loss is.
      num_resamples: how many were asked.
      num_without: how many of them have no optimum, and count for nothing.
    """

    params: tuple[float, float]
    tokens: tuple[float, float]
    flops: tuple[float, float] | None
    num_resamples: int
    num_without: int


class Found(NamedTuple):
    """What is found for a case.

    Attributes:
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
      warnings: doubts in words.
    """

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
    warnings: list[str]


def find(case: Case) -> Found:
    """Finds the optimum, its interval, and designs."""
    powers, flops = case.belief.powers, case.flops
    free = budgets.allocate(powers, flops)
    optimum = case.allocate()

    def along(log_params: np.ndarray) -> np.ndarray:
        sizes = np.exp(log_params)
        return case.loss(sizes, budgets.tokens_left(flops, sizes, case.served))

    family = case.family
    try:
        design = designs.nearest(family, optimum.num_params)
    except ValueError as error:
        raise _refusal(case, error, _other_vocabulary(case, optimum)) from None
    try:
        exact = designs.best(family, case.loss, flops, inference_tokens=case.served)
    except ValueError as error:
        raise _refusal(case, error, "; a smaller --sequence might do") from None
    memory = training(design.model, sequence=family.sequence, checkpointing="boundary")
    left = flops / design.flops_per_token - case.served / 3
    found = Found(
        free=free,
        optimum=optimum,
        searched=budgets.search(along, flops, case.served),
        equal=budgets.cheapest(powers, free.loss, inference_tokens=case.served),
        confidence=_loss_interval(case, optimum, "confidence"),
        prediction=_loss_interval(case, optimum, "prediction"),
        spread=_spread(case, optimum),
        design=design,
        design_tokens=max(left, 0.0),
        exact=exact,
        memory=memory,
        warnings=[],
    )
    return found._replace(warnings=_warnings(case, found))


def min_devices(case: Case, found: Found) -> int | None:
    """Devices whose memory together holds a training step of one sequence."""
    if case.offer is None or case.offer.memory_bytes is None:
        return None
    return math.ceil(found.memory.total / case.offer.memory_bytes)


def _refusal(case: Case, error: ValueError, way_out: str) -> ValueError:
    limits = ""
    if case.options.unique_tokens is not None:
        limits += f" and {case.options.unique_tokens:.4g} unique tokens"
    if case.served:
        limits += f" with {case.served:.4g} tokens to serve"
    target = case.options.target_loss
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


def _loss_interval(
    case: Case, optimum: Optimum, kind: Literal["confidence", "prediction"]
) -> tuple[float, float] | None:
    """Interval of the loss at the optimum; none for published constants."""
    fit = case.belief.fit
    if fit is None:
        return None
    num_params, num_tokens = optimum.num_params, optimum.num_tokens
    if "num_unique_tokens" not in fit.inputs:
        num_params, num_tokens = case.worth(num_params, num_tokens)
    data = {"num_params": num_params, "num_tokens": num_tokens}
    data["num_unique_tokens"] = case.options.unique_tokens or num_tokens
    found = predict(fit, data, kind, level=case.options.level)
    ends = float(found.low[0]), float(found.high[0])
    return ends if all(map(math.isfinite, ends)) else None


def _spread(case: Case, optimum: Optimum) -> Spread | None:
    """Allocates the budget by every resample of a fit."""
    fit, law = case.belief.fit, case.belief.law
    if fit is None or fit.samples is None:
        return None
    samples = fit.sampled()
    if case.served or case.options.unique_tokens is not None:
        samples = samples[:_MAX_RESAMPLES]
    optima, needed = [], []
    for sample in samples:
        named = dict(zip(law.coefficients, map(float, sample), strict=True))
        try:
            belief = believe(case.belief.name, law, named)
            believed = case._replace(belief=belief)
            found = believed.allocate()
            if case.options.target_loss is not None:
                needed.append(_log_needed(believed))
            optima.append([math.log(found.num_params), math.log(found.num_tokens)])
        except (ValueError, OverflowError):  # a resample without an optimum
            continue
    if len(optima) < 2:
        return None
    estimate = np.log([optimum.num_params, optimum.num_tokens])
    size = {"num_points": fit.num_points, "k": fit.num_free}
    level = case.options.level
    low, high = np.exp(
        intervals.from_samples(estimate, np.array(optima), level, loss=fit.loss, **size)
    )
    flops = None
    if needed:
        ends = intervals.from_samples(
            *(np.log([case.flops]), np.array(needed)[:, None], level),
            loss=fit.loss,
            **size,
        )
        least, most = (float(end[0]) for end in ends)
        flops = math.exp(least), math.inf if most > _NEVER / 2 else math.exp(most)
    return Spread(
        params=(float(low[0]), float(high[0])),
        tokens=(float(low[1]), float(high[1])),
        flops=flops,
        num_resamples=len(samples),
        num_without=len(samples) - len(optima),
    )


def _log_needed(case: Case) -> float:
    """Logarithm of the budget that a resample asks for; `_NEVER` if none is enough."""
    try:
        return math.log(case.needed())
    except ValueError:
        return _NEVER


def _warnings(case: Case, found: Found) -> list[str]:
    said, belief, options = [], case.belief, case.options
    if belief.fit is not None:
        said += belief.doubts
        said += [f"{belief.law.name}: {line}" for line in belief.fit.warnings]
        most = belief.fit.ranges.get("flops", (math.nan, math.nan))[1]
        trained = 6 * found.optimum.num_params * found.optimum.num_tokens
        if trained > 10 * most:
            said.append(
                f"training takes {trained / most:,.3g} times the operations of the "
                "largest run that was fitted"
            )
    if found.spread is not None and found.spread.num_without:
        said.append(
            f"{found.spread.num_without} of {found.spread.num_resamples} resamples "
            "have no optimum: the intervals of N and D are of the others"
        )
    if options.target_loss is not None:
        spread = found.spread
        if belief.fit is not None and spread is None:
            said.append(
                "the budget has no interval: the fit has no resamples (fit --bootstrap)"
            )
        if spread is not None and spread.flops is not None:
            if math.isinf(spread.flops[1]):
                said.append(
                    f"by some resamples no budget reaches a loss of "
                    f"{options.target_loss:g}: it may be below the floor"
                )
    if belief.count and options.count and options.count != belief.count:
        said.append(
            f"the fit counted {belief.count} parameters, --count is {options.count}"
        )
    if options.unique_tokens is not None:
        half = case._replace(flops=case.flops / 2).allocate()
        if half.loss - found.optimum.loss < 1e-3 * (half.loss - belief.powers.floor):
            said.append(
                "the data is used up: half of the budget would reach a loss of "
                f"{half.loss:.4f}, all of it {found.optimum.loss:.4f}"
            )
    off = found.design.num_params / found.optimum.num_params - 1
    if abs(off) > 0.01:
        said.append(f"the nearest design is {100 * off:+.1f} % off in parameters")
    number, _ = division(case, device_seconds(case, case.flops))
    needed = min_devices(case, found)
    if number is not None and needed is not None and number < needed:
        said.append(
            f"{number} devices cannot hold a training step: it needs {needed} at least"
        )
    if found.design_tokens == 0:
        said.append("with every operation counted, serving takes the whole budget")
    return said
