"""Checks of the online softmax against one softmax over all keys."""

from types import ModuleType
from typing import Any

import numpy as np


def drive_attend(
    solution: ModuleType,
    scores: list[list[float]],
    values: list[list[float]],
    parts: list[list[list[int]]],
) -> dict[str, Any]:
    """Adds the blocks `[start, stop]` of each part, and joins the parts."""
    all_scores, all_values = np.asarray(scores), np.asarray(values)
    states = []
    sizes = []
    with np.errstate(all="ignore"):
        for blocks in parts:
            state = solution.start_rows(all_scores.shape[0], all_values.shape[1])
            for start, stop in blocks:
                block = np.s_[start:stop]
                state = solution.add_block(
                    state, all_scores[:, block].copy(), all_values[block].copy()
                )
                sizes.append(sum(int(np.size(x)) for x in state.values()))
            states.append(state)
        joined = states[0]
        for state in states[1:]:
            joined = solution.join_states(joined, state)
        return {"output": solution.read_output(joined), "sizes": sizes}


def check_outputs(process: Any, inputs: list[dict[str, Any]]) -> str:
    """Compares outputs with a plain softmax in float64, the smallest inputs first."""
    for arguments in inputs:
        answer = process.call("attend", *arguments.values())
        output = np.asarray(answer["output"], float)
        scores = np.asarray(arguments["scores"])
        values = np.asarray(arguments["values"])
        is_seen = np.isfinite(scores)
        largest = np.max(scores, axis=1, keepdims=True)
        shift = np.where(np.isfinite(largest), largest, 0.0)
        weights = np.where(is_seen, np.exp(scores - shift), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        expected = weights @ values / np.where(total > 0, total, 1.0)
        parts = [*arguments["parts"]]
        lessons = {
            "Subtract the running maximum before the exponential.": shift.max() > 700,
            "While all keys are masked the maximum is -inf, and -inf - -inf is NaN.": (
                not is_seen.all()
            ),
            "When the maximum grows, the old sums are multiplied by exp(old - new).": (
                max(map(len, parts)) > 1
            ),
            "Both states are brought to the larger maximum before they are added.": (
                len(parts) > 1
            ),
        }
        setting = f"With scores {_short(scores)} and the blocks of each part {parts}"
        if output.shape != expected.shape:
            return (
                f"{setting}, the output has shape {output.shape}, not {expected.shape}"
            )
        error = np.abs(output - expected)
        wrong = ~(error <= 1e-9 * (1 + np.abs(expected)))
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            why = " ".join(x for x, applies in lessons.items() if applies)
            return (
                f"{setting}, output[{row}, {column}] is {output[row, column]:.6g}; "
                f"values {_short(values)} give {expected[row, column]:.6g}. {why}"
            )
    return ""


def check_state_size(process: Any, inputs: list[dict[str, Any]]) -> str:
    """Checks that a state does not grow with the number of blocks."""
    for arguments in inputs:
        sizes = process.call("attend", *arguments.values())["sizes"]
        if len(set(sizes)) > 1:
            return (
                f"A state has {sizes[0]} numbers after 1 block and {sizes[-1]} after "
                f"{len(sizes)}: keep a maximum, a sum and a weighted sum per query, "
                "not the keys"
            )
    return ""


def _short(array: np.ndarray) -> str:
    if array.size > 16:
        return f"of shape {array.shape}"
    return str(np.round(array, 3).tolist())
