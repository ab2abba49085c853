"""The options of `jaxkv plan`: a budget, what it is spent on, and a law of losses."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

from experiments.cli import parsing

LEAST, MOST = 1e-6, 1e40
"""Of any amount: beyond these nothing means anything, and products overflow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A budget, what it may be spent on, and what is believed of losses."""

    gpu: tuple[str, ...] = ()
    """A device to rent, NAME:USD_PER_HOUR:TFLOPS; once for each."""
    budget_usd: Annotated[
        float | None, parsing.describe_default("--flops, or --days with --devices")
    ] = None
    """Money to spend."""
    flops: Annotated[
        float | None, parsing.describe_default("--budget-usd, or --days with --devices")
    ] = None
    """Operations to spend, in place of money."""
    target_loss: Annotated[
        float | None,
        parsing.describe_default("--budget-usd, --flops, or --days with --devices"),
    ] = None
    """Loss to reach, in nats per token, with the smallest budget that does."""
    mfu: float = 0.4
    """Share of a device's peak that training reaches."""
    law: str = "lecture"
    """Published constants by name, or a fit.json, or the folder of a fit."""
    group: Annotated[str | None, parsing.describe_default("the only one")] = None
    """Of a fit with --by, the group whose law is taken."""
    days: Annotated[float | None, parsing.describe_default("no limit")] = None
    """How long training may take; the number of devices follows."""
    devices: Annotated[
        int | None, parsing.describe_default("as many as --days needs")
    ] = None
    """How many devices; the duration follows. With --days, the budget."""
    count: Annotated[
        Literal["total", "non-embedding", "matmul", "active"] | None,
        parsing.describe_default("as in the fit, or total"),
    ] = None
    """Which parameters N counts."""
    inference_tokens: float = 0.0
    """Tokens that the model will read and write; the budget is to pay for them too."""
    serve_mfu: Annotated[float | None, parsing.describe_default("as --mfu")] = None
    """Share of the peak that serving reaches."""
    unique_tokens: Annotated[
        float | None, parsing.describe_default("as many as are needed")
    ] = None
    """Tokens that there are; more are repetitions."""
    vocab_size: Annotated[
        int | None,
        parsing.describe_default("that of the sweep behind --law, or 32,000"),
    ] = None
    """Of the architecture."""
    sequence: Annotated[
        int | None, parsing.describe_default("that of the sweep behind --law, or 4,096")
    ] = None
    """Tokens of a training sequence."""
    tie_embeddings: bool = False
    """Whether the architecture's head is its embedding; it is after a sweep of such
    models."""
    attention: Literal["full", "causal"] = "full"
    """How exact operations count pairs of query and key."""
    level: float = 0.9
    """Probability of the intervals of a fit."""
    plot: bool = False
    """Draw the figure."""
    out: Annotated[
        Path | None, parsing.describe_default("none, with --plot a new one under runs/")
    ] = None
    """Folder for plan.json, architecture.json and the figure."""

    def __post_init__(self) -> None:
        """Refuses numbers that cannot be."""
        amounts = ("budget_usd", "flops", "days", "devices", "unique_tokens")
        for name in (*amounts, "target_loss"):
            self._refuse_outside(name, f"[{LEAST:g}, {MOST:g}]", LEAST, MOST)
        self._refuse_outside("inference_tokens", f"[0, {MOST:g}]", 0, MOST)
        for name in ("mfu", "serve_mfu"):
            self._refuse_outside(name, "(0, 1]", math.nextafter(0, 1), 1)
        self._refuse_outside("level", "(0, 1)", math.nextafter(0, 1), _BELOW_ONE)

    def _refuse_outside(self, name: str, allowed: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {value:g}: must be in {allowed}")


_BELOW_ONE = math.nextafter(1, 0)
