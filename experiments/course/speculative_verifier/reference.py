"""A verifier for speculative decoding."""

import numpy as np


def verify_draft(
    draft_tokens: list[int],
    draft_probs: np.ndarray,
    target_probs: np.ndarray,
    rng: np.random.Generator,
) -> list[int]:
    """Accepts a prefix of the draft tokens, and samples one more token.

    Args:
      draft_tokens: k tokens; token i was drawn from row i of `draft_probs`.
      draft_probs: probabilities of the draft model, shape [k, vocabulary].
      target_probs: probabilities of the target model, shape [k + 1, vocabulary].
      rng: random numbers.

    Returns:
      The accepted tokens and one more, 1 to k + 1 tokens.
    """
    # SOLUTION
    emitted = []
    for i, token in enumerate(draft_tokens):
        ratio = target_probs[i, token] / draft_probs[i, token]
        if rng.random() < ratio:
            emitted.append(token)
            continue
        residual = np.maximum(target_probs[i] - draft_probs[i], 0.0)
        final_probs = residual / residual.sum()
        break
    else:
        final_probs = target_probs[len(draft_tokens)]
    # A draw by inversion; the last comparison is with 1 up to rounding.
    index = np.searchsorted(np.cumsum(final_probs), rng.random(), side="right")
    return [*emitted, min(int(index), len(final_probs) - 1)]
    # END
