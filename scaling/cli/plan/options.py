"""Options of `jaxkv plan`: a budget, its use, and a scaling law."""

import math
from pathlib import Path
from typing import Annotated, Literal

from jaxkv.cli import describe_default, refuse_outside
from jaxkv.validation import ConfigRecord
from scaling.cli.simulate import parse_objectives

MIN_VALUE = 1e-6
MAX_VALUE = 1e40
"""Limits of any amount; products would overflow beyond them."""


class PlanOptions(ConfigRecord):
    """A budget, its use, and a scaling law."""

    gpu: tuple[str, ...] = ()
    """Device to rent, NAME:USD_PER_HOUR:TFLOPS; may be given several times."""
    budget_usd: Annotated[
        float | None, describe_default("--flops, or --days with --devices")
    ] = None
    """Budget in USD."""
    budget_joules: Annotated[float | None, describe_default("--budget-usd")] = None
    """Budget in joules."""
    flops: Annotated[
        float | None, describe_default("--budget-usd, or --days with --devices")
    ] = None
    """Budget in operations."""
    target_loss: Annotated[
        float | None,
        describe_default("--budget-usd, --flops, or --days with --devices"),
    ] = None
    """Loss to reach, in nats per token, with the smallest sufficient budget."""
    mfu: float = 0.4
    """Share of a device's peak rate in training (MFU)."""
    law: str = "lecture"
    """Name of published constants, or a fit.json, or the folder of a fit."""
    group: Annotated[str | None, describe_default("the only one")] = None
    """Group whose law is used, for a fit with --by."""
    days: Annotated[float | None, describe_default("no limit")] = None
    """Duration of training in days; the number of devices follows."""
    devices: Annotated[int | None, describe_default("as many as --days needs")] = None
    """Number of devices; the duration follows. With --days it is the budget."""
    count: Annotated[
        Literal["total", "non-embedding", "matmul", "active"] | None,
        describe_default("as in the fit, or total"),
    ] = None
    """Parameters that N counts."""
    inference_tokens: float = 0.0
    """Tokens that the model will read and write; the budget pays for them as well."""
    serve_mfu: Annotated[float | None, describe_default("as --mfu")] = None
    """Share of the peak rate in serving."""
    serve: Annotated[str, describe_default("none")] = ""
    """Load that the budget pays for too, PROMPT:ANSWER:RATE in tokens and requests per
    second, or a file of recorded requests."""
    serve_days: float = 365.0
    """Days for which the load is served."""
    objective: Annotated[str, describe_default("none")] = ""
    """Limits of servers in s, as ttft_mean=1,tpot_mean=0.05."""
    whole_servers: bool = False
    """Pay for whole servers all the time, not for the share that the load takes."""
    least: Annotated[
        Literal["usd", "joules"] | None, describe_default("as the budget, or usd")
    ] = None
    """Unit of the cost of training and serving."""
    draws: int = 200
    """Draws of law and servers for the intervals of --serve."""
    coefficients: Annotated[Path | None, describe_default("published")] = None
    """File of jaxkv calibrate TABLE, for --serve."""
    grams_per_kwh: Annotated[float | None, describe_default("none")] = None
    """Carbon of the energy that --serve takes."""
    unique_tokens: Annotated[
        float | None, describe_default("as many as are needed")
    ] = None
    """Available unique tokens; more tokens are repetitions."""
    vocab_size: Annotated[
        int | None,
        describe_default("that of the sweep of --law, or 32,000"),
    ] = None
    """Vocabulary of the architecture."""
    sequence: Annotated[
        int | None, describe_default("that of the sweep of --law, or 4,096")
    ] = None
    """Tokens of a training sequence."""
    kv_heads: Annotated[int | None, describe_default("8 from 32 query heads on")] = None
    """KV heads of the architecture, or the next fewer that divide its heads."""
    tie_embeddings: bool = False
    """Tie the head to the embedding; also the default after a sweep of such models."""
    attention: Literal["full", "causal"] = "full"
    """Pairs of query and key in the exact operations."""
    level: float = 0.9
    """Probability of the intervals of a fit."""
    plot: bool = False
    """Draw the figure."""
    out: Annotated[
        Path | None, describe_default("none, with --plot a new one under runs/")
    ] = None
    """Folder for plan.json, architecture.json and the figure."""

    def __post_init__(self) -> None:
        """Validates the amounts."""
        super().__post_init__()
        amounts = (
            "budget_usd",
            "budget_joules",
            "flops",
            "days",
            "devices",
            "unique_tokens",
        )
        for name in (*amounts, "target_loss"):
            refuse_outside(
                self, name, f"in [{MIN_VALUE:g}, {MAX_VALUE:g}]", MIN_VALUE, MAX_VALUE
            )
        refuse_outside(self, "inference_tokens", f"in [0, {MAX_VALUE:g}]", 0, MAX_VALUE)
        for name in ("mfu", "serve_mfu"):
            refuse_outside(self, name, "in (0, 1]", math.nextafter(0, 1), 1)
        name = "grams_per_kwh"
        refuse_outside(self, name, "in [0, 1e6] g", 0, 1e6)
        refuse_outside(self, "serve_days", f"in [0, {MAX_DAYS:g}]", 0, MAX_DAYS)
        refuse_outside(self, "draws", "in [2, 10000]", 2, 10_000)
        parse_limits(self.objective)
        self._refuse_combinations()
        refuse_outside(self, "level", "in (0, 1)", math.nextafter(0, 1), _BELOW_ONE)

    def _refuse_combinations(self) -> None:
        for name in ("objective", "whole_servers", "least", *_OF_SERVERS):
            if not self.serve and getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} needs --serve")
        has_both = self.days is not None and self.devices is not None
        for name, is_set in (
            ("flops", self.flops is not None),
            ("days and --devices", has_both),
        ):
            if self.serve and is_set:
                raise ValueError(
                    f"--{name} and --serve exclude each other: servers are paid from "
                    "--budget-usd or --budget-joules, or for --target-loss"
                )
        for name in ("inference_tokens", "unique_tokens"):
            if self.serve and getattr(self, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} and --serve exclude each other"
                )
        budget = None
        if self.budget_usd is not None or self.budget_joules is not None:
            budget = "joules" if self.budget_usd is None else "usd"
        if self.least and budget not in (None, self.least):
            raise ValueError(
                f"--least {self.least} and --budget-{budget}: the budget has its unit"
            )

    @property
    def unit(self) -> Literal["usd", "joules"]:
        """Unit of the cost of training and serving."""
        return self.least or ("usd" if self.budget_joules is None else "joules")


def parse_limits(text: str) -> tuple[float, float]:
    """Parses `ttft_mean=1,tpot_mean=0.05`; infinity where there is no limit.

    Raises:
      ValueError: the text has another form, or a limit is not of a mean of these.
    """
    limits = {"ttft": math.inf, "tpot": math.inf}
    for objective in parse_objectives(text):
        name = f"{objective.latency}_{objective.statistic}"
        if objective.latency not in limits or objective.statistic != "mean":
            raise ValueError(
                f"--objective {name}: must be ttft_mean or tpot_mean; `jaxkv simulate` "
                "predicts other statistics of a server"
            )
        limits[objective.latency] = objective.limit_s
    return limits["ttft"], limits["tpot"]


_OF_SERVERS = ("coefficients", "grams_per_kwh")
MAX_DAYS = 36_525.0
_BELOW_ONE = math.nextafter(1, 0)
