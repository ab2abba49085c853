"""`jaxkv records`: the list of records, or their remaking."""

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Annotated

from experiments.cli.doubts import best_yardsticks
from experiments.cli.record_list import CODE, Record, git, list_records
from experiments.cli.remaking import Remaking
from jaxkv.cli import RESUMABLE, CommandOutput, describe_default, parse_options
from jaxkv.report import Sheet, describe_machine, paragraph
from jaxkv.validation import format_unknown_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordsOptions:
    """Options of `jaxkv records`."""

    make: Annotated[tuple[str, ...], describe_default("none")] = ()
    """Records to make again; `all` for all but times of other processors."""
    since: Annotated[str | None, describe_default("none")] = None
    """Commit whose descendants' records are kept, so that the same command continues
    its work."""
    max_seconds: Annotated[float, describe_default("no limit")] = math.inf
    """Time limit in s, after which a process is paused; the same command continues
    it."""
    scratch: Path = Path("runs/records")
    """Folder for processes under way."""


def main(args: list[str]) -> CommandOutput:
    """Runs `records [--make NAME] [--since COMMIT]`."""
    description = "Lists the shipped records, or makes them again, the shortest first."
    options = parse_options(RecordsOptions, args, "jaxkv records", description)
    records = list_records()
    chosen = _choose(records, options)
    if not options.make:
        return _show(records)
    if git("status", "--porcelain", *CODE):
        raise ValueError("the working tree differs from its commit; commit it first")
    end_s = time.monotonic() + options.max_seconds
    print(f"{len(chosen)} records, {_minutes(chosen)}", file=sys.stderr)
    lines = []
    waiting = [x.name for x in chosen]
    for record in chosen:
        if time.monotonic() >= end_s:
            break
        line = Remaking(record, options.scratch).advance(end_s)
        if line:
            waiting.remove(record.name)
            lines.append(line)
        elif not record.is_timed:
            break
    if lines:
        lines.append("then: jaxkv claims --write experiments/RESULTS.md")
    status = 0
    if waiting:
        lines.append(f"to do: {', '.join(waiting)}; run the same command to continue")
        status = RESUMABLE
    return CommandOutput({"made": lines, "waiting": waiting}, [], lines, status)


def _choose(records: list[Record], options: RecordsOptions) -> list[Record]:
    """Returns the records to make, the shortest first."""
    if options.since is not None and not options.make:
        raise ValueError("--since needs --make")
    if not options.max_seconds > 0:
        raise ValueError(f"--max-seconds {options.max_seconds:g}: must be above 0")
    names = [record.name for record in records]
    for name in options.make:
        if name not in (*names, "all"):
            raise ValueError(format_unknown_name("record", name, names))
    machine = describe_machine()
    chosen = [
        x
        for x in records
        if x.name in options.make
        or (
            "all" in options.make
            and not (x.is_timed and x.env["cpu"] != machine["cpu"])
        )
    ]
    if options.since is not None:
        if git("rev-parse", "--verify", f"{options.since}^{{commit}}") is None:
            raise ValueError(f"--since {options.since}: is no commit")
        chosen = [x for x in chosen if not _is_since(x.env["commit"], options.since)]
    return sorted(chosen, key=lambda x: x.env["duration_s"])


def _is_since(commit: str, first: str) -> bool:
    is_clean = not commit.endswith("+")
    return is_clean and git("merge-base", "--is-ancestor", first, commit) is not None


def _minutes(records: list[Record]) -> str:
    return f"{sum(x.env['duration_s'] for x in records) / 60:.0f} min when last made"


def _show(records: list[Record]) -> CommandOutput:
    """Returns the list of all records."""
    best = best_yardsticks(x.env for x in records)
    rows = []
    documents = []
    for x in records:
        doubt = x.doubt(best)
        commit = x.env["commit"]
        documents.append(
            {
                "name": x.name,
                "experiment": x.env["experiment"],
                "date": x.env["started_at"][:10],
                "commit": commit,
                "commits_since": x.age,
                "seconds": x.env["duration_s"],
                "timed": x.is_timed,
                "unverified": doubt,
            }
        )
        age = "-" if x.age is None else str(x.age)
        seconds = f"{x.env['duration_s']:.0f}"
        date = x.env["started_at"][:10]
        kind = "times" if x.is_timed else "-"
        rows.append((x.name, date, age, seconds, kind, doubt or "-"))
    columns = ("record", "date", "age", "seconds", "kind", "unverified")
    sheet = Sheet("", columns, rows, "age: commits since the record's commit")
    num_doubts = sum(bool(row["unverified"]) for row in documents)
    line = f"{len(rows)} records, {_minutes(records)}; {num_doubts} are unverified."
    return CommandOutput({"records": documents}, [paragraph("", line), sheet], [])
