"""Tables of training runs: losses of a running sweep, and learning rates tried."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.framework import Direction, describe_machine, format_number
from jaxkv.progress import Progress
from scaling.sweeps import SweepConfig, SweepOutcome, run_sweep

MAX_COLUMNS = 8
"""Largest number of token counts in one table."""


def run_sweep_with_progress(
    config: SweepConfig, out: Path, progress: Progress
) -> SweepOutcome:
    """Runs a sweep with progress bars and a table of losses."""
    described = describe_machine()
    return run_sweep(
        config,
        out,
        commit=described["commit"] or "",
        environment={"environment": described},
        progress=progress,
        report=lambda records: progress.show(loss_table(records)),
    )


def loss_table(records: list[dict[str, Any]]) -> str:
    """Returns the best losses so far: model sizes down, tokens or budgets across.

    A cell shows the status if all learning rates failed or diverged.
    """
    sizes = sorted({(r["num_params"], r["hidden_size"]) for r in records})
    tokens = sorted({r["num_tokens"] for r in records})
    lines = []
    if 0 < len(tokens) <= MAX_COLUMNS:
        lines = [
            "params \\ tokens" + "".join(f"{format_number(x):>12}" for x in tokens)
        ]
    for size, _ in sizes:
        selected = [r for r in records if r["num_params"] == size]
        if lines:
            cells = [
                format_best_loss([r for r in selected if r["num_tokens"] == n])
                for n in tokens
            ]
            lines.append(
                f"{format_number(size):>15}" + "".join(f"{x:>12}" for x in cells)
            )
    if lines:
        return "\n".join(lines)
    # With budgets, each size has its own token counts.
    for size, width in sizes:
        selected = [r for r in records if r["num_params"] == size]
        cells = []
        for steps in sorted({r["num_steps"] for r in selected}):
            here = [r for r in selected if r["num_steps"] == steps]
            cells.append(f"{here[0]['flops']:.1e}: {format_best_loss(here)}")
        lines.append(f"width {width}, {size:,} parameters   " + "   ".join(cells))
    return "\n".join(lines)


def format_best_loss(records: list[dict[str, Any]]) -> str:
    """Returns the best loss of some runs, or the status of the last one."""
    done = [r["loss"] for r in records if r["status"] == "done"]
    if done:
        return f"{min(done):.4f}"
    return records[-1]["status"] if records else "."


RATE_HEADS = ("rate: loss", "taken", "at the edge")
"""Column headings for `format_rates`."""


def format_rates(
    rates: Float[np.ndarray, " trials"],
    losses: Float[np.ndarray, " trials"],
    chosen: float,
) -> tuple[str, str, str]:
    """Returns learning rates, ascending, with their losses, and the chosen one."""
    order = np.argsort(rates)
    pairs = zip(rates[order], losses[order], strict=True)
    shown = ", ".join(f"{rate:.2g}: {loss:.3f}" for rate, loss in pairs)
    is_edge = chosen in (rates.min(), rates.max())
    return shown, f"{chosen:.2g}", "yes" if is_edge else "no"


def format_interval(low: float, high: float, digits: int = 2) -> str:
    """Returns an interval as text; "not identified" if an end is not finite."""
    if not np.isfinite([low, high]).all():
        return "not identified"
    return f"{low:.{digits}f} to {high:.{digits}f}"


def judge_direction(low: float, high: float, *, above: float = 1.0) -> str:
    """Returns whether an interval shows that a number is above a bound."""
    if low > above:
        return "shows"
    return "does not show: the other way" if high < above else "is not decided"


def direction_verdict(shown: str) -> Direction:
    """Returns the verdict of a claim whose source states a direction.

    Args:
      shown: result of `judge_direction`.
    """
    if shown == "shows":
        return "holds"
    return "fails" if shown.startswith("does not show") else "not decided"
