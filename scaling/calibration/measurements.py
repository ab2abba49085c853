"""Load stages of real servers as their clients measured them, one row each.

    run, stage, model                      names of run and checkpoint, index of stage
    tensor_parallel                        devices that divide the model
    max_model_len, max_num_batched_tokens, max_num_seqs
                                           settings of the server, with vLLM's names
    arrivals, rate_per_s, duration_s       "constant" or "poisson", requests/s, s
    system_prompts, users_per_system_prompt, system_prompt_tokens, question_tokens,
    answer_tokens                          the prompts, and the length of each answer
    successes, failures                    requests; a stage with failures is overloaded
    e2e_s_*, ttft_s_*, tpot_s_*            mean, median and p99 in s

Optional columns: `device` (default H100 SXM), `block_size` (16), `num_blocks` (from the
memory of the devices), `prefix_caching` (True), `prompt_tokens_mean` and
`prompt_tokens_max` (sums of the lengths). A table without the latencies describes
servers that are to be predicted. Further columns are ignored.

Requests come from `system_prompts * users_per_system_prompt` distinct prompts, repeated
in turn. The client may count several streamed chunks for a token: the scale of
`tpot_s_*` is taken from end-to-end and first-token times.
"""

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxkv.files import RawRow, RawTable, read_table


class LatencySummary(NamedTuple):
    """Latencies of the requests of a load stage in s."""

    mean: Any
    median: Any
    p99: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """A constant load on a server, and the latencies that its clients measured."""

    run: str
    """Name of the run; stages of a run follow each other on one server."""
    stage: int
    """Index of the stage in its run, from 0."""
    model: str
    """Name of the checkpoint, as in `shapes.describe_checkpoint`."""
    device: str
    """Name of the accelerator, as in `costs.find_device`."""
    tensor_parallel: int
    """Degree of tensor parallelism, which is the number of devices."""
    max_model_len: int
    """Largest length of a sequence in tokens."""
    max_num_batched_tokens: int
    """Largest number of tokens fed in a step."""
    max_num_seqs: int
    """Largest number of running sequences."""
    block_size: int
    """Tokens of a block of the KV cache."""
    num_blocks: int | None
    """Blocks of the KV cache; None if they follow from the devices' memory."""
    prefix_caching: bool
    """True if the server keeps the blocks of earlier prompts."""
    arrivals: Literal["constant", "poisson"]
    """Arrival process."""
    rate_per_s: float
    """Mean requests per second."""
    duration_s: float
    """Length of the stage in s."""
    system_prompts: int
    """Number of shared prefixes."""
    users_per_system_prompt: int
    """Number of distinct prompts with each prefix."""
    system_prompt_tokens: int
    """Length of each shared prefix in tokens."""
    question_tokens: int
    """Nominal length of a prompt after its prefix in tokens."""
    answer_tokens: int
    """Length of each answer in tokens."""
    prompt_tokens: float
    """Mean length of the prompts in tokens, prefixes included."""
    max_prompt_tokens: int
    """Length of the longest prompt in tokens."""
    successes: int
    """Requests that were answered; 0 if none was measured."""
    failures: int
    """Requests that failed or were given up."""
    end_to_end_s: LatencySummary | None
    """From a request to its last token."""
    first_token_s: LatencySummary | None
    """From a request to its first token."""
    inter_token_s: LatencySummary | None
    """Mean time between the tokens of a request."""

    @property
    def num_prompts(self) -> int:
        """Number of distinct prompts."""
        return self.system_prompts * self.users_per_system_prompt

    @property
    def is_overloaded(self) -> bool:
        """True if requests failed: the queue grows for the whole stage."""
        return self.failures > 0

    @property
    def name(self) -> str:
        """Name in tables: run and stage."""
        return f"{self.run}/{self.stage}"


def read_measured_stages(path: str | os.PathLike[str]) -> tuple[MeasuredStage, ...]:
    """Reads the load stages of a table with the columns of the module docstring.

    Warns about the first row whose numbers look like another unit.

    Raises:
      ValueError: the file cannot be read or has no rows, a column is missing, a value
        is out of range, or two rows have the same run and stage; one line with the file
        and the row.
    """
    table = read_table(path, allow_partial=False)
    if not table.rows:
        raise ValueError(f"{path}: has no rows")
    has_latencies = any(name in table.names for name in _LATENCY_COLUMNS)
    measured = (*_REQUEST_COLUMNS, *_LATENCY_COLUMNS) if has_latencies else ()
    needed = (*_MEASUREMENT_COLUMNS, *measured)
    if missing := [name for name in needed if name not in table.names]:
        raise ValueError(f"{path}: lacks the columns {', '.join(missing)}")
    stages: dict[str, MeasuredStage] = {}
    places: dict[str, str] = {}
    doubts = []
    for row in table.rows:
        stage = _read_stage(table, row, has_latencies)
        if stage.name in stages:
            raise ValueError(
                f"{path}: {row.place}: run={stage.run!r} and stage={stage.stage} are "
                f"those of {places[stage.name]}"
            )
        stages[stage.name] = stage
        places[stage.name] = row.place
        if has_latencies and (doubt := _find_doubt(stage, row)):
            doubts.append(f"{path}: {row.place}: {doubt}")
    if doubts:
        more = f" ({len(doubts) - 1} more rows)" if len(doubts) > 1 else ""
        warnings.warn(doubts[0] + more, stacklevel=2)
    return tuple(stages.values())


LONGEST_STEP_S = 1.0
"""Time per token in s above which times are doubted."""


def _find_doubt(stage: MeasuredStage, row: RawRow) -> str:
    """Returns a doubt about the units of a stage, or ""."""
    assert stage.end_to_end_s is not None
    assert stage.inter_token_s is not None
    whole_s = float(stage.end_to_end_s.mean)
    step_s = float(stage.inter_token_s.mean)
    # The client's own time per token; several chunks for a token make it smaller.
    client_s = float(row.cells["tpot_s_mean"])
    if stage.answer_tokens > 1 and step_s > LONGEST_STEP_S:
        return (
            f"{step_s:,.4g} s per token follow from e2e_s_mean={whole_s:g}; are the "
            "times in milliseconds?"
        )
    if stage.answer_tokens > 1 and client_s > 10 * step_s:
        return (
            f"tpot_s_mean={client_s:g}, and {step_s:.4g} s per token follow from "
            "e2e_s_mean; are some times in milliseconds?"
        )
    if not stage.is_overloaded and whole_s > stage.duration_s:
        return (
            f"e2e_s_mean={whole_s:g} exceeds duration_s={stage.duration_s:g} without "
            "failures; do both have the unit s?"
        )
    num_sent = stage.rate_per_s * stage.duration_s
    num_counted = stage.successes + stage.failures
    if num_counted and not 0.5 < num_sent / num_counted < 2:
        return (
            f"rate_per_s * duration_s is {num_sent:,.4g} requests, and successes + "
            f"failures is {num_counted:,}; are the rate and the duration in s?"
        )
    return ""


_MEASUREMENT_COLUMNS = (
    *("run", "stage", "model", "tensor_parallel"),
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs"),
    *("arrivals", "rate_per_s", "duration_s"),
    *("system_prompts", "users_per_system_prompt", "system_prompt_tokens"),
    *("question_tokens", "answer_tokens"),
)
_LATENCY_NAMES = ("e2e_s", "ttft_s", "tpot_s")
_LATENCY_COLUMNS = tuple(
    f"{kind}_{x}" for kind in _LATENCY_NAMES for x in LatencySummary._fields
)
_REQUEST_COLUMNS = ("successes", "failures")


class RowCells(NamedTuple):
    """The cells of a row, converted with errors that name file, row and column."""

    place: str
    cells: Mapping[str, object]

    def has(self, name: str) -> bool:
        """Returns True if the row has a cell of a column."""
        return self.cells.get(name) not in (None, "")

    def text(self, name: str) -> str:
        """Returns the text of a cell. Raises: ValueError: there is none."""
        if not self.has(name):
            raise self.error(name, "a name")
        return str(self.cells[name]).strip()

    def number(
        self, name: str, *, low: int | float = 0, is_open: bool = False
    ) -> float:
        """Returns a cell as a number. Raises: ValueError: it is none in range."""
        cell: Any = self.cells.get(name)
        try:
            value = math.nan if isinstance(cell, bool) else float(cell)
        except (TypeError, ValueError):
            value = math.nan
        if not low <= value < math.inf or (is_open and value == low):
            bound = f"above {low:g}" if is_open else f"at least {low:g}"
            raise self.error(name, f"a number {bound}")
        return value

    def integer(self, name: str, *, low: int = 1, default: int | None = None) -> int:
        """Returns a whole number, or the default of an empty cell."""
        if default is not None and not self.has(name):
            return default
        value = self.number(name, low=low)
        if value != int(value):
            raise self.error(name, "a whole number")
        return int(value)

    def error(self, name: str, kind: str) -> ValueError:
        """Returns the error of a cell that is not of a kind."""
        value = self.cells.get(name)
        return ValueError(f"{self.place}: {name}={value!r} must be {kind}")


def _read_stage(table: RawTable, row: RawRow, has_latencies: bool) -> MeasuredStage:
    c = RowCells(f"{table.path}: {row.place}", row.cells)
    arrivals = c.text("arrivals").lower()
    if arrivals not in ("constant", "poisson"):
        raise c.error("arrivals", "constant or poisson")
    caching = c.text("prefix_caching") if c.has("prefix_caching") else "true"
    if caching.lower() not in ("true", "false"):
        raise c.error("prefix_caching", "true or false")
    system, question = (
        c.integer(f"{x}_tokens", low=0) for x in ("system_prompt", "question")
    )
    if not (nominal := system + question):
        raise c.error("question_tokens", "at least 1 without a system prompt")
    mean = float(nominal)
    if c.has("prompt_tokens_mean"):
        mean = c.number("prompt_tokens_mean", low=1.0)
    answer = c.integer("answer_tokens")
    longest = max(nominal, math.ceil(mean))
    if c.has("prompt_tokens_max"):
        longest = c.integer("prompt_tokens_max")
        if longest < mean:
            raise c.error("prompt_tokens_max", f"at least {mean:g}, the mean length")
    max_length = c.integer("max_model_len", low=2)
    if longest + answer > max_length:
        raise c.error("max_model_len", f"at least {longest + answer}, the longest load")
    latencies: list[LatencySummary | None] = [None] * 3
    if has_latencies:
        end_to_end, first, inter = (
            LatencySummary(
                *(c.number(f"{kind}_{x}", is_open=True) for x in LatencySummary._fields)
            )
            for kind in _LATENCY_NAMES
        )
        if end_to_end.mean < first.mean:
            raise c.error("e2e_s_mean", f"at least ttft_s_mean={first.mean:g}")
        for kind, x in zip(_LATENCY_NAMES, (end_to_end, first, inter), strict=True):
            if x.p99 < x.median:
                raise c.error(f"{kind}_p99", f"at least {kind}_median={x.median:g}")
        if answer > 1:
            scale = (end_to_end.mean - first.mean) / (answer - 1) / inter.mean
            inter = LatencySummary(*(x * scale for x in inter))
        latencies = [end_to_end, first, inter]
    return MeasuredStage(
        run=c.text("run"),
        stage=c.integer("stage", low=0),
        model=c.text("model"),
        device=c.text("device") if c.has("device") else "h100",
        tensor_parallel=c.integer("tensor_parallel"),
        max_model_len=max_length,
        max_num_batched_tokens=c.integer("max_num_batched_tokens"),
        max_num_seqs=c.integer("max_num_seqs"),
        block_size=c.integer("block_size", default=16),
        num_blocks=c.integer("num_blocks") if c.has("num_blocks") else None,
        prefix_caching=caching.lower() == "true",
        arrivals=arrivals,
        rate_per_s=c.number("rate_per_s", is_open=True),
        duration_s=c.number("duration_s", is_open=True),
        system_prompts=c.integer("system_prompts"),
        users_per_system_prompt=c.integer("users_per_system_prompt"),
        system_prompt_tokens=system,
        question_tokens=question,
        answer_tokens=answer,
        prompt_tokens=mean,
        max_prompt_tokens=longest,
        successes=c.integer("successes", low=0, default=None if has_latencies else 0),
        failures=c.integer("failures", low=0, default=None if has_latencies else 0),
        end_to_end_s=latencies[0],
        first_token_s=latencies[1],
        inter_token_s=latencies[2],
    )
