"""Softmax-weighted sums over blocks, in one pass, with constant memory."""

import numpy as np

type RowState = dict[str, np.ndarray]


def start_rows(num_queries: int, value_size: int) -> RowState:
    """Returns the state before the first block, a dictionary of arrays."""
    # SOLUTION
    return {
        "maximum": np.full(num_queries, -np.inf),
        "total": np.zeros(num_queries),
        "weighted": np.zeros((num_queries, value_size)),
    }
    # END


def add_block(state: RowState, scores: np.ndarray, values: np.ndarray) -> RowState:
    """Adds a block of keys.

    Args:
      state: the state of the blocks so far.
      scores: shape [queries, keys]; -inf for masked keys.
      values: shape [keys, value_size].
    """
    # SOLUTION
    shift = np.max(scores, axis=1)
    weights = np.exp(scores - np.where(np.isfinite(shift), shift, 0.0)[:, None])
    block = {
        "maximum": shift,
        "total": weights.sum(axis=1),
        "weighted": weights @ values,
    }
    return join_states(state, block)
    # END


def join_states(first: RowState, second: RowState) -> RowState:
    """Joins the states of two disjoint sets of keys."""
    # SOLUTION
    maximum = np.maximum(first["maximum"], second["maximum"])
    shift = np.where(np.isfinite(maximum), maximum, 0.0)
    scales = [np.exp(x["maximum"] - shift) for x in (first, second)]
    return {
        "maximum": maximum,
        "total": scales[0] * first["total"] + scales[1] * second["total"],
        "weighted": scales[0][:, None] * first["weighted"]
        + scales[1][:, None] * second["weighted"],
    }
    # END


def read_output(state: RowState) -> np.ndarray:
    """Returns the output, shape [queries, value_size]; 0 for rows without a key."""
    # SOLUTION
    total = state["total"][:, None]
    return np.where(total > 0, state["weighted"] / np.where(total > 0, total, 1.0), 0.0)
    # END
