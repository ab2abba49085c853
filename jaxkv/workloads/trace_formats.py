"""Columns of the formats of recorded traces.

    Azure       TIMESTAMP (a date, or s), ContextTokens, GeneratedTokens
    BurstGPT    Timestamp (s), Request tokens, Response tokens, optionally Total tokens,
                and in later files Session ID, Elapsed time (s); also without spaces or
                capitals
    plain       arrival_s (or arrival_ms, arrival_us), prompt_tokens, output_tokens, and
                optionally session, delay_s; arrival or timestamp in place of arrival_s
                is a date, or a number whose unit is asked for
    Bailian     timestamp (s), input_length, output_length, chat_id, parent_chat_id, and
                optionally hash_ids of 16 tokens
    Mooncake    timestamp (ms), input_length, output_length, and optionally hash_ids of
                512 tokens; AIPerf adds session_id and delay (ms)

Sources: the READMEs of Azure/AzurePublicDataset (2023: dates without a zone and with 7
decimals; 2024: with a zone and 6 decimals), HPMLL/BurstGPT (release 1.2 and 2.0),
alibaba-edu/qwen-bailian-usagetraces-anon and kvcache-ai/Mooncake (FAST25-release);
ai-dynamo/aiperf, `docs/tutorials` and `src/aiperf/dataset/loader/models.py`. Papers:
Patel et al. 2024 (Splitwise), arXiv:2311.18677; Stojkovic et al. 2025 (DynamoLLM),
arXiv:2408.00741; Wang et al. 2025 (BurstGPT), arXiv:2401.17644; Qin et al. 2025
(Mooncake), FAST.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

DATE = "date"
"""Unit of times in ISO 8601."""
SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""Units of times -> units in a second."""


class TraceFormat(NamedTuple):
    """Columns of a format."""

    time: str
    """Column of the times at which requests were sent."""
    prompt: str
    """Column of the prompt lengths in tokens."""
    output: str
    """Column of the output lengths in tokens."""
    unit: str
    """Unit of the times: a key of `SECONDS_PER_UNIT`, or `DATE`; "" if it is not
    documented."""
    session: str = ""
    """Column of sessions; an empty or absent cell means none. "" for no such column."""
    answer: str = ""
    """Column of the time from a request to its answer in s."""
    delay: str = ""
    """Column of the time between an answer and the next turn, in `unit`."""
    chat: str = ""
    """Column of the ids to which `parent` refers."""
    parent: str = ""
    """Column of the request that each request continues."""
    hash_ids: str = ""
    """Column of the chunk ids."""
    chunk_tokens: int = 0
    """Documented tokens of a chunk."""
    total: str = ""
    """Column of the sums of prompt and output length."""
    has_turns: bool = False
    """True if prompts of later turns of a session leave out the earlier turns."""

    @property
    def required(self) -> tuple[str, ...]:
        """The columns without which a file has another format."""
        columns = (self.time, self.prompt, self.output, self.chat, self.parent)
        return tuple(filter(None, columns))


_LENGTH_COLUMNS = ("input_length", "output_length")
_PLAIN_COLUMNS = ("prompt_tokens", "output_tokens")
MOONCAKE = TraceFormat(
    *("timestamp", *_LENGTH_COLUMNS, "ms"),
    session="session_id",
    delay="delay",
    hash_ids="hash_ids",
    chunk_tokens=512,
    has_turns=True,
)
TRACE_FORMATS = (
    TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", DATE),
    TraceFormat(
        *("Timestamp", "Request tokens", "Response tokens", "s"),
        session="Session ID",
        answer="Elapsed time",
        total="Total tokens",
    ),
    TraceFormat("arrival_s", *_PLAIN_COLUMNS, "s", session="session", delay="delay_s"),
    TraceFormat("arrival_ms", *_PLAIN_COLUMNS, "ms", session="session"),
    TraceFormat("arrival_us", *_PLAIN_COLUMNS, "us", session="session"),
    TraceFormat("arrival", *_PLAIN_COLUMNS, "", session="session"),
    TraceFormat("timestamp", *_PLAIN_COLUMNS, "", session="session"),
    TraceFormat(
        *("timestamp", *_LENGTH_COLUMNS, "s"),
        chat="chat_id",
        parent="parent_chat_id",
        hash_ids="hash_ids",
        chunk_tokens=16,
    ),
    MOONCAKE,
)
"""The formats; a file has the first one of which it has all required columns."""


def find_format(names: Collection[str], repeated: Collection[str]) -> TraceFormat:
    """Finds the format of a table, with the names of its columns as they are written.

    Args:
      names: the columns.
      repeated: names of several columns, which cannot be read.

    Raises:
      ValueError: no format has these columns.
    """
    for kind in TRACE_FORMATS:
        # BurstGPT's columns have several spellings.
        spell = _squeeze if kind.answer else str
        written = {spell(name): name for name in names}
        if all(spell(name) in written for name in kind.required):
            columns: dict[str, Any] = {
                field: written.get(spell(name), name)
                for field, name in kind._asdict().items()
                if field in _TRACE_FIELDS
            }
            return kind._replace(**columns)
    # Turns of sessions may have no times, and the error has the row without a number.
    if MOONCAKE.time in names or {MOONCAKE.prompt, MOONCAKE.session} <= {*names}:
        return MOONCAKE
    for name in repeated:
        if any(name in kind.required for kind in TRACE_FORMATS):
            raise ValueError(f"two columns are named {name!r}")
    choices = "; ".join(", ".join(kind.required) for kind in TRACE_FORMATS)
    shown = ", ".join(names)
    raise ValueError(f"its columns are {shown}; known are: {choices}")


_TRACE_FIELDS = (
    "time",
    "prompt",
    "output",
    "session",
    "answer",
    "delay",
    "chat",
    "parent",
)
_TRACE_FIELDS += ("hash_ids", "total")


def _squeeze(name: str) -> str:
    return name.replace(" ", "").replace("_", "").lower()
