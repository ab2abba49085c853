"""Checks of the verifier: its form, and its distribution by many calls."""

import math
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np

FALSE_ALARM = 1e-7
"""Bound on the probability that a check refuses a right verifier."""
RATIO = "A draft token x is accepted with probability min(1, target(x) / draft(x))."
RESIDUAL = (
    "After a rejection the token is drawn from max(0, target - draft), normalized: "
    "drawing from the target adds to tokens that the draft already covers."
)
BONUS = "If all drafts are accepted, one more token comes from the last target row."


def drive_verify_draft(
    solution: ModuleType,
    draft_probs: list[list[float]],
    target_probs: list[list[float]],
    num_calls: int,
    seed: int,
) -> list[tuple[list[int], list[int]]]:
    """Draws drafts and calls the verifier, in the process of the solution."""
    rng = np.random.default_rng(seed)
    draft = np.asarray(draft_probs)
    target = np.asarray(target_probs)
    columns = [rng.choice(len(row), num_calls, p=row).tolist() for row in draft]
    drafts = [list(tokens) for tokens in zip(*columns, strict=True)]
    answers = (solution.verify_draft(list(x), draft, target, rng) for x in drafts)
    return [(x, [int(token) for token in y]) for x, y in zip(drafts, answers)]  # noqa: B905


def is_plausible(num_hits: int, num: int, share: float, num_looks: int) -> bool:
    """Tests a count of independent events of a given probability.

    By Chernoff's bound a share `s` or one further from `p` has a probability of at most
    `exp(-n KL(s || p))` on each side, which holds for every n. The threshold divides
    `FALSE_ALARM` by the number of looks and sides.
    """
    observed = num_hits / max(num, 1)
    divergence = 0.0
    for a, b in ((observed, share), (1 - observed, 1 - share)):
        if a > 0:
            divergence += a * math.log(a / b) if b > 0 else math.inf
    return num * divergence <= math.log(2 * num_looks / FALSE_ALARM)


def check_form(process: Any, laws: list[Any], lengths: list[int]) -> str:
    """Checks lengths, accepted prefixes and certain outcomes."""
    for law, length in zip(laws, lengths, strict=True):
        for draft, emitted in process.call("verify_draft", *law):
            setting = f"With {_describe(law)} and the draft {draft}, the answer"
            if not 1 <= len(emitted) <= len(draft) + 1:
                return (
                    f"{setting} {emitted} has {len(emitted)} tokens; it must have the "
                    f"accepted ones and one more, 1 to {len(draft) + 1}"
                )
            if emitted[:-1] != draft[: len(emitted) - 1]:
                return f"{setting} {emitted} must begin with accepted draft tokens"
            if len(emitted) != length:
                why = BONUS if length > 1 else RATIO
                return f"{setting} {emitted} must be of length {length}. {why}"
            if not law[1][length - 1][emitted[-1]]:
                return (
                    f"{setting} ends with {emitted[-1]}, whose target probability is 0"
                )
    return ""


def check_distribution(process: Any, laws: list[Any]) -> str:
    """Compares the tokens at each position with the target's probabilities."""
    for law in laws:
        answers = process.call("verify_draft", *law)
        target = law[1]
        for position, probs in enumerate(target):
            tokens = [y[position] for _, y in answers if len(y) > position]
            hits = Counter(tokens)
            for token, share in enumerate(probs):
                num_looks = len(target) * len(probs)
                if not is_plausible(hits[token], len(tokens), share, num_looks):
                    is_last = position == len(target) - 1
                    return (
                        f"With {_describe(law)}, token {token} is "
                        f"{hits[token] / len(tokens):.1%} of {len(tokens)} tokens at "
                        f"position {position}; its target probability is {share:.1%}. "
                        f"{BONUS if is_last else f'{RATIO} {RESIDUAL}'} "
                        "(A right verifier is refused with a probability below "
                        f"{FALSE_ALARM:g}.)"
                    )
    return ""


def check_acceptance(process: Any, laws: list[Any]) -> str:
    """Compares the acceptance of the first draft token with the largest possible."""
    for law in laws:
        answers = process.call("verify_draft", *law)
        draft, target = (np.asarray(x[0]) for x in law[:2])
        share = float(np.minimum(draft, target).sum())
        num_accepted = sum(len(emitted) > 1 for _, emitted in answers)
        if not is_plausible(num_accepted, len(answers), share, 1):
            return (
                f"With {_describe(law)}, {num_accepted / len(answers):.1%} of the "
                f"first draft tokens are accepted; sum(min(draft, target)) = "
                f"{share:.1%} is possible without a change of the distribution, and "
                f"no more. {RATIO}"
            )
    return ""


def _describe(law: list[Any]) -> str:
    draft, target = (np.round(x, 3).tolist() for x in law[:2])
    return f"draft probabilities {draft} and target probabilities {target}"
