"""Options of `jaxkv simulate`: a server, its load, an objective.

The module imports no array library, so that `--help` answers at once.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from jaxkv.cli import describe_default, refuse_outside
from jaxkv.validation import ConfigRecord

LATENCY_OPTIONS = ("e2e", "ttft", "tpot")
STATISTIC_OPTIONS = ("mean", "p50", "p90", "p99")
MAX_REQUEST_TOKENS = 2**29
"""Largest number of tokens of a prompt or an answer."""


class LatencyObjective(NamedTuple):
    """A limit of a statistic of a latency over the requests."""

    latency: str
    """One of `LATENCY_OPTIONS`."""
    statistic: str
    """One of `STATISTIC_OPTIONS`."""
    limit_s: float

    @property
    def text(self) -> str:
        """The objective as it is printed."""
        return f"{self.latency} {self.statistic} <= {self.limit_s:g} s"


class SimulateOptions(ConfigRecord):
    """A server, its load, and the output."""

    device: str = "h100"
    """Accelerator, as for jaxkv cost."""
    devices: Annotated[int | None, describe_default("as --parallel")] = None
    """Devices of the server."""
    parallel: Annotated[str, describe_default("tp=1")] = ""
    """Parallel layout: tp=N, the only kind that is fitted."""
    tp: Annotated[int | None, describe_default("as --devices")] = None
    """Short for --parallel tp=N."""
    dtype: Literal["bfloat16", "float16", "float8", "float32"] = "bfloat16"
    """Type of weights, keys and values; 16 bits are fitted."""
    gpu_memory_utilization: float = 0.9
    """Share of the memory that the server uses."""
    num_blocks: Annotated[int | None, describe_default("by memory")] = None
    """Blocks of the KV cache."""
    block_size: int = 16
    """Tokens of a block."""
    max_num_seqs: int = 128
    """Largest number of running sequences."""
    max_num_batched_tokens: int = 2048
    """Largest number of tokens fed in a step."""
    max_model_len: Annotated[int | None, describe_default("the model's")] = None
    """Largest length of a sequence."""
    prefix_caching: bool = True
    """Keep the K and V of a shared prefix."""
    policy: str = "vllm"
    """Scheduling policy: vllm, that of the fitted servers, vLLM 0.15; vllm-0.19, fcfs,
    prefill-first or static; FILE.py:NAME, or FILE.json."""
    verify: bool = False
    """Test --policy by random loads, in place of MODEL."""
    rate: Annotated[float | None, describe_default("--sweep or --trace")] = None
    """Requests per second."""
    sweep: Annotated[str, describe_default("one rate")] = ""
    """Several rates, rate=LOW:HIGH:NUMBER."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    """Arrival process."""
    prompt_tokens: Annotated[str, describe_default("--trace")] = ""
    """Tokens of a prompt, or sharegpt, alpaca."""
    answer_tokens: Annotated[str, describe_default("--trace")] = ""
    """Tokens of an answer, or sharegpt, alpaca."""
    prefix_tokens: int = 0
    """Cached tokens before each prompt."""
    trace: Annotated[Path | None, describe_default("none")] = None
    """File of recorded requests."""
    time_unit: Annotated[
        Literal["s", "ms", "us"] | None, describe_default("the trace's")
    ] = None
    """Unit of the times of --trace."""
    chunk_tokens: Annotated[int | None, describe_default("the trace's")] = None
    """Tokens for each of the hash_ids of --trace."""
    cache_tokens: int = 0
    """Tokens kept for prompts that a trace repeats."""
    compare: bool = False
    """Compare each request with the first_token_s and last_token_s of --trace."""
    fit_requests: Annotated[int | None, describe_default("none")] = None
    """First requests of --trace, from 2, to whose times coefficients are fitted; the
    later ones are compared."""
    num_requests: Annotated[int | None, describe_default("as --duration")] = None
    """Requests in the window, about."""
    duration: Annotated[float | None, describe_default("25, or 200 requests")] = None
    """Length of the window in s."""
    warm_up: Annotated[
        float | None, describe_default("8, or 1.2 answers; --trace: 0")
    ] = None
    """Seconds of load before the window."""
    objective: Annotated[str, describe_default("none")] = ""
    """Limits in s: ttft=0.5,tpot_p90=0.05,e2e_mean=9; of P99 by default."""
    stages: Annotated[Path | None, describe_default("none")] = None
    """Table of load stages to predict, in place of MODEL."""
    coefficients: Annotated[Path | None, describe_default("published")] = None
    """File of jaxkv calibrate."""
    usd_per_hour: Annotated[float | None, describe_default("none")] = None
    """Price of one device, for dollars per answer and per million tokens."""
    grams_per_kwh: Annotated[float | None, describe_default("none")] = None
    """Carbon of energy, for grams per answer and per million tokens."""
    measure_next: bool = False
    """Name the loads whose measurement would narrow the intervals most."""
    draws: Annotated[int | None, describe_default("32, or all")] = None
    """Draws of the coefficients."""
    seed: int = 0
    """Random seed."""
    record: Annotated[Path | None, describe_default("none")] = None
    """File for the first 5,000 steps of the first draw, for jaxkv view."""
    plot: bool = False
    """Draw the figure."""
    out: Annotated[
        Path | None, describe_default("none, with --plot a new one under runs/")
    ] = None
    """Folder for simulate.json and the figure."""

    def __post_init__(self) -> None:
        """Validates each option."""
        super().__post_init__()
        counts = ("devices", "tp", "num_blocks", "block_size", "max_num_seqs")
        counts += ("max_num_batched_tokens", "num_requests", "draws", "chunk_tokens")
        for name in counts:
            refuse_outside(self, name, "a whole number from 1", 1)
        for name in ("max_model_len", "fit_requests"):
            refuse_outside(self, name, "a whole number from 2", 2)
        for name in ("prefix_tokens", "cache_tokens", "seed"):
            refuse_outside(self, name, "a whole number from 0", 0)
        above_0 = math.nextafter(0, 1)
        name = "gpu_memory_utilization"
        refuse_outside(self, name, "in (0, 1]", above_0, 1.0)
        refuse_outside(self, "rate", "above 0 requests per second", above_0)
        refuse_outside(self, "usd_per_hour", "above 0 USD per hour", above_0)
        refuse_outside(self, "grams_per_kwh", "in [0, 1e6] g", 0, 1e6)
        refuse_outside(self, "duration", "above 0 seconds", above_0)
        refuse_outside(self, "warm_up", "at least 0 seconds", 0)
        for flag, text in (
            ("--prompt-tokens", self.prompt_tokens),
            ("--answer-tokens", self.answer_tokens),
        ):
            parse_tokens(flag, text)
        parse_objectives(self.objective)
        parse_sweep(self.sweep)


def parse_tokens(flag: str, text: str) -> int | str:
    """Parses a number of tokens, or the name of a distribution; "" is no length.

    Raises:
      ValueError: the text is neither.
    """
    name = text.lower()
    if name in ("", "sharegpt", "alpaca"):
        return name
    if text.isdecimal() and 1 <= int(text) <= MAX_REQUEST_TOKENS:
        return int(text)
    raise ValueError(
        f"{flag} {text}: must be a whole number from 1, sharegpt or alpaca"
    )


def parse_objectives(text: str) -> tuple[LatencyObjective, ...]:
    """Parses `ttft=0.5,tpot_p90=0.05`; P99 where no statistic is named.

    Raises:
      ValueError: a latency or statistic is unknown or given twice, or a limit is not a
        number above 0.
    """
    objectives: dict[tuple[str, str], LatencyObjective] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = word.partition("=")
        latency, _, statistic = name.partition("_")
        statistic = statistic or "p99"
        if latency not in LATENCY_OPTIONS or statistic not in STATISTIC_OPTIONS:
            raise ValueError(
                f"--objective {word}: must be one of {', '.join(LATENCY_OPTIONS)}, "
                f"with one of {', '.join(f'_{x}' for x in STATISTIC_OPTIONS)}, "
                "or without"
            )
        try:
            limit_s = float(value)
        except ValueError:
            limit_s = math.nan
        if not 0 < limit_s < math.inf:
            raise ValueError(f"--objective {word}: needs a limit above 0 s")
        if (latency, statistic) in objectives:
            raise ValueError(f"--objective {text}: {name} is given twice")
        objectives[latency, statistic] = LatencyObjective(latency, statistic, limit_s)
    return tuple(objectives.values())


def parse_sweep(text: str) -> tuple[float, ...]:
    """Parses `rate=LOW:HIGH:NUMBER` to evenly spaced rates; "" is no rate.

    Raises:
      ValueError: the text has another form, or the rates do not ascend from above 0.
    """
    if not text:
        return ()
    number = r"(\d+\.?\d*(?:[eE][-+]?\d+)?)"
    match = re.fullmatch(rf"rate={number}:{number}:(\d+)", text)
    form = f"--sweep {text}: must be rate=LOW:HIGH:NUMBER"
    if match is None:
        raise ValueError(f"{form}, such as rate=1:40:20")
    low = float(match[1])
    high = float(match[2])
    num = int(match[3])
    if not 0 < low < high < math.inf or not 2 <= num <= 1000:
        raise ValueError(f"{form} with 0 < LOW < HIGH and NUMBER in [2, 1000]")
    return tuple(low + (high - low) * k / (num - 1) for k in range(num))
