"""Prompt and answer lengths with published means, and the pages that answers share."""

import numpy as np

from jaxkv.workloads import Gamma, Lengths, Pair, rescale_to_means

NUM_DRAWN = 8192
"""Pairs drawn to represent a distribution."""
NUM_ROUNDS = 100
NUM_SWAPS = 10_000


def draw_lengths(
    pair: Pair,
    num: int,
    max_length: int,
    rng: np.random.Generator,
    *,
    scale: float = 1.0,
) -> Lengths:
    """Draws lengths whose means equal those of Gamma distributions exactly.

    Pairs longer than `max_length` are discarded, and the rest is scaled to the means.
    Prompts and outputs are then divided into `num` quantile groups of equal
    probability, each represented by its mean, and paired at random; pairs that would
    exceed `max_length` are swapped.

    Args:
      pair: distributions of prompt and output; the sum of their means must be at most
        half of `max_length`.
      num: number of requests, from 1 to some hundred.
      max_length: limit of prompt plus output, in tokens; bounds of `pair` are ignored.
      rng: random generator.
      scale: factor on the means.

    Returns:
      Lengths; prompts have at least 1 token, outputs at least 2.

    Raises:
      ValueError: the distribution is too long for `max_length`.
    """
    prompt_law = pair.prompt
    output_law = pair.output
    assert isinstance(prompt_law, Gamma)
    assert isinstance(output_law, Gamma)
    shapes = np.array([prompt_law.shape, output_law.shape])
    means = np.array([prompt_law.mean * scale, output_law.mean * scale])
    too_long = f"{means.tolist()} tokens on average do not fit {max_length=}"
    if means.sum() > max_length / 2:
        raise ValueError(too_long)
    unit = rng.gamma(shapes, 1 / shapes, (NUM_DRAWN, 2))

    def fits(tokens: np.ndarray) -> np.ndarray:
        return tokens.sum(1) <= max_length - 3

    stretched = rescale_to_means(unit, means, fits, num_rounds=NUM_ROUNDS)
    if stretched is None:
        raise ValueError(too_long)
    mask = fits(unit * stretched)
    draws = unit[mask][: mask.sum() // num * num] * stretched
    parts = np.sort(draws, axis=0).reshape(num, -1, 2)
    sizes = parts.mean(1).round().astype(int)
    prompt = np.maximum(sizes[:, 0], 1)
    output = rng.permutation(np.maximum(sizes[:, 1], 2))
    for _ in range(NUM_SWAPS):
        misfits = np.flatnonzero(prompt + output > max_length)
        if not misfits.size:
            return Lengths(prompt, output)
        two = [misfits[0], rng.integers(num)]
        output[two] = output[two[::-1]]
    raise ValueError(too_long)


def measured_page_saving(lengths: Lengths, num_answers: int, page_size: int) -> float:
    """Returns the share of pages that parallel answers save, from counts of tokens.

    While `n` answers of one prompt grow, equally long, each holds the pages of prompt
    and answer, and the full pages of the prompt exist once instead of n times. Over the
    steps of all requests the saving is (n - 1) / n of the share of full prompt pages.
    Example: two answers to a prompt of 33 tokens, each of 17 tokens, with pages of 16.
    In 15 of 16 steps each answer holds 3 pages, in the last one 4, and 2 of those are
    full prompt pages, so the saving is 1/2 * 2 * 16 / 49 = 0.327.

    Args:
      lengths: lengths of the requests. The last token of an answer is never written.
      num_answers: answers per request, n.
      page_size: tokens per page.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4; figure 15a measures it.
    """
    full = pages = 0
    for prompt, output in zip(*lengths, strict=True):
        places = prompt + np.arange(1, output)
        full += (prompt // page_size) * len(places)
        pages += int((-(-places // page_size)).sum())
    return (num_answers - 1) / num_answers * full / pages
