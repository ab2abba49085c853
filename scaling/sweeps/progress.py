"""Progress of a sweep: its environment is recorded, and a table has the losses."""

from collections.abc import Sequence
from pathlib import Path

from jaxkv.progress import Progress
from jaxkv.report import describe_machine, format_number
from scaling.sweeps.folder import RecordRow
from scaling.sweeps.grid import SweepConfig
from scaling.sweeps.sweep import SweepOutcome, run_sweep

MAX_COLUMNS = 8
"""Largest number of token counts in one table."""


def run_logged_sweep(
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


def loss_table(records: Sequence[RecordRow]) -> str:
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
            cell = [r for r in selected if r["num_steps"] == steps]
            cells.append(f"{cell[0]['flops']:.1e}: {format_best_loss(cell)}")
        lines.append(f"width {width}, {size:,} parameters   " + "   ".join(cells))
    return "\n".join(lines)


def format_best_loss(records: Sequence[RecordRow]) -> str:
    """Returns the best loss of some runs, or the status of the last one."""
    done = [
        loss
        for r in records
        if r["status"] == "done" and (loss := r["loss"]) is not None
    ]
    if done:
        return f"{min(done):.4f}"
    return records[-1]["status"] if records else "."
