"""A sweep under a compute allowance, and the design for a larger budget."""

import itertools

import numpy as np

type Run = list[float]
"""`[num_params, num_tokens, loss]`."""


def choose_run(history: list[Run], remaining_flops: float) -> list[float] | None:
    """Returns parameters and tokens of the next run; None ends the sweep.

    Args:
      history: runs so far.
      remaining_flops: the allowance less 6 N D of each run so far.
    """
    # SOLUTION
    # Four budgets, each a quarter of the next, with five sizes around 20 tokens per
    # parameter; each run of the largest budget takes a seventh of the allowance.
    spent = sum(6 * num_params * num_tokens for num_params, num_tokens, _ in history)
    top = (spent + remaining_flops) / 7
    budgets = [top / 4**level for level in (3, 2, 1, 0)]
    if len(history) == 5 * len(budgets):
        return None
    flops = budgets[len(history) // 5]
    num_params = np.sqrt(flops / 6 / 20) * 2.0 ** (len(history) % 5 * 1.5 - 3)
    return [float(num_params), float(flops / 6 / num_params)]
    # END


def choose_size(history: list[Run], flops: float) -> dict[str, float]:
    """Returns `num_params`, `num_tokens` and the predicted `loss` for a budget.

    Args:
      history: all runs of the sweep.
      flops: budget of one training run, much larger than the allowance.
    """
    # SOLUTION
    # L = E + A / N^a + B / D^b: for each pair (a, b) the rest is linear.
    num_params, num_tokens, loss = np.asarray(history).T
    best = (np.inf, 0.36, 0.36, np.zeros(3))
    for steps in (0.04 * np.arange(-5, 6), 0.005 * np.arange(-8, 9)):
        _, a_0, b_0, _ = best
        for a, b in itertools.product(a_0 + steps, b_0 + steps):
            terms = np.stack([num_params**0, num_params**-a, num_tokens**-b], axis=1)
            scale = terms.max(axis=0)
            solved = np.linalg.lstsq(terms / scale, loss, rcond=None)[0] / scale
            error = float(np.sum((terms @ solved - loss) ** 2))
            if error < best[0] and solved.min() > 0:
                best = (error, float(a), float(b), solved)
    _, a, b, (floor, scale_params, scale_tokens) = best
    sizes = np.geomspace(1e5, 1e13, 20001)
    tokens = flops / 6 / sizes
    losses = floor + scale_params * sizes**-a + scale_tokens * tokens**-b
    i = int(np.argmin(losses))
    return {
        "num_params": float(sizes[i]),
        "num_tokens": float(tokens[i]),
        "loss": float(losses[i]),
    }
    # END
