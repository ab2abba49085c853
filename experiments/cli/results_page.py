"""Claims of all records, on one page.

A record is any run folder, by default those that ship with the project. The page is
generated from the files `claims.json`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from experiments.framework import load_experiment
from jaxkv import files, report
from jaxkv.cli import CommandOutput, describe_default, parse_options
from jaxkv.report import (
    NOT_JUDGED,
    Claim,
    ReportPart,
    Sheet,
    claim_numbers,
    count_verdicts,
    from_plain,
)

RECORDS = Path(__file__).parents[1] / "records"
RESULTS_PAGE = Path(__file__).parents[1] / "RESULTS.md"
_APART = {"calibrated": ", calibrated", "checks": ", check"}
"""Suffix of the verdict of claims that are not reproductions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimsOptions:
    """Options of `jaxkv claims`."""

    folder: Annotated[
        Path | None, describe_default("the records that ship with the project")
    ] = None
    """Folder that contains run folders."""
    write: Annotated[Path | None, describe_default("none")] = None
    """File for a page of all claims."""


class ClaimsRecord(NamedTuple):
    """Claims of a run folder, with its environment."""

    experiment: str
    question: str
    config: str
    """Name of its config; "own" if it differs from all shipped ones."""
    folder: str
    """Path relative to the given folder."""
    env: dict[str, Any]
    claims: list[Claim]


def find_records(folder: Path) -> list[ClaimsRecord]:
    """Reads all run folders in a folder, in order of their paths.

    Raises:
      ValueError: there is no run folder, or a file in one is invalid.
    """
    records = [
        read_record(path.parent, folder) for path in sorted(folder.rglob("claims.json"))
    ]
    if not records:
        raise ValueError(f"{folder}: holds no run folder with a claims.json")
    return records


_OF_ENV = {"started_at": str, "duration_s": float, "cpu": str, "num_cpus": int}
"""Fields of `env.json` on the page."""


def read_record(run: Path, root: Path) -> ClaimsRecord:
    """Reads one run folder."""
    try:
        env, claimed = (
            json.loads(files.read_text(run / f"{name}.json"))
            for name in ("env", "claims")
        )
        for name, kind in _OF_ENV.items():
            from_plain(kind, env[name], name)
        claims = []
        for row in claimed:
            # Folders of earlier versions lack the kind.
            other = "cannot compare" if row["verdict"] == "differs" else "reproduces"
            row = {"kind": other} | row
            for name, hint in get_type_hints(Claim).items():
                is_unset = name not in row and name in Claim._field_defaults
                # A number that is not finite is null.
                if not is_unset and (row[name] is not None or hint is not float):
                    from_plain(hint, row[name], name)
            claims.append(Claim(**row))
        experiment = load_experiment(str(env["experiment"]))
        where = run / "config.json"
        own_config = experiment.config_loads(files.read_text(where), str(where))
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{run}: not a run folder: {error}") from None
    names = (
        name for name, config in experiment.configs.items() if config == own_config
    )
    return ClaimsRecord(
        experiment=experiment.name,
        question=experiment.question,
        config=next(names, "own"),
        folder=run.relative_to(root).as_posix(),
        env=env,
        claims=claims,
    )


def render_page(records: list[ClaimsRecord]) -> str:
    """Renders the page in Markdown."""
    sections = ["# Claims and measured numbers", _first_line(records), _STATUS_LEGEND]
    for record in records:
        if not record.claims:
            continue
        env = record.env
        rows = ["| | claim | numbers | |", "|---|---|---|---|"]
        sections.append(
            f"## {record.question}\n\n`jaxkv run {record.experiment} {record.config}`,"
            f" {env['started_at'][:10]}, {env['duration_s']:.0f} s, {env['cpu']}"
            f" ({env['num_cpus']} cores). Folder: `records/{record.folder}`."
        )
        for x in record.claims:
            verdict = f"**{x.verdict}**{_APART.get(x.kind, '')}"
            cells = (verdict, x.claim, claim_numbers(x), x.note)
            rows.append(f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |")
        sections.append("\n".join(rows))
    return "\n\n".join(sections) + "\n"


_STATUS_LEGEND = (
    "*Holds*: our number is within the tolerance of the published one. *Fails*: it is"
    " outside, under the same conditions. *Differs*: the conditions differ, so the"
    " numbers cannot be compared; the note gives the reason, and a direction that the"
    " source states is judged separately. *Calibrated*: a fit of this project used the"
    " published number. *Check*: an oracle, an identity or a bar of this project; its"
    " number is expected, not published. `jaxkv claims --write` generates this page"
    " from the run folders in `experiments/records`."
)


def _first_line(records: list[ClaimsRecord]) -> str:
    """Counts verdicts by kind."""
    counts = count_verdicts(claim for record in records for claim in record.claims)
    shown, fits, checks, ways = (
        counts[x] for x in ("reproductions", "calibrated", "checks", "directions")
    )
    directions = f"{ways['holds']} hold, {ways['fails']} fail"
    if undecided := sum(ways.values()) - ways["holds"] - ways["fails"]:
        directions += f", {undecided} are not decided"
    parts = [
        f"Reproductions ({sum(shown.values())}): {shown['holds']} hold,"
        f" {shown['fails']} fail, {shown['differs']} cannot compare"
        f" (directions that their sources state: {directions})",
        f"Calibrated ({sum(fits.values())}): {_plain_counts(fits)}",
        f"Own checks ({sum(checks.values())}): {_plain_counts(checks)}",
    ]
    if skipped := sum(x.get(NOT_JUDGED, 0) for x in counts.values()):
        parts.append(f"Not judged, smoke: {skipped}")
    return ". ".join(parts) + "."


def _plain_counts(counts: dict[str, int]) -> str:
    return (
        f"{counts['holds']} hold, {counts['fails']} fail,"
        f" {counts['differs']} differ in conditions"
    )


def main(args: list[str]) -> CommandOutput:
    """Runs `claims [OPTIONS]`."""
    description = "Claims of run folders: published and measured numbers, verdicts."
    options = parse_options(ClaimsOptions, args, "jaxkv claims", description)
    return list_claims(options.folder, options.write)


def list_claims(folder: Path | None, write: Path | None) -> CommandOutput:
    """Runs `jaxkv claims`.

    Args:
      folder: folder with run folders; None means the shipped records.
      write: file for the page.

    Raises:
      ValueError: a run folder is invalid, or there is none.
    """
    if folder is None and not any(RECORDS.glob("*/claims.json")):
        raise ValueError(
            "records are in the repository, not in the installed package; give --folder"
        )
    records = find_records(RECORDS if folder is None else folder)
    lines = []
    if write is not None:
        files.write_atomically(write, render_page(records))
        lines.append(f"page: {write}")
    keys = ("experiment", "config", "folder", "claims")
    document = [{name: getattr(x, name) for name in keys} for x in records]
    counts = count_verdicts(claim for record in records for claim in record.claims)
    sheets: list[ReportPart] = [report.paragraph("", _first_line(records))]
    sheets += [
        Sheet(
            f"{x.experiment} {x.config}",
            ("verdict", "kind", "claim", "numbers"),
            [(c.verdict, c.kind, c.claim, claim_numbers(c)) for c in x.claims],
        )
        for x in records
        if x.claims
    ]
    return CommandOutput({"counts": counts, "records": document}, sheets, lines)
