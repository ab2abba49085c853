"""Claims of all records, on one page.

A record is any run folder, by default those that ship with the project. The page is
generated from the files `claims.json`.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from experiments.cli.doubts import (
    BestTimes,
    best_yardsticks,
    find_doubt,
    is_timed,
)
from experiments.cli.paper_table import list_papers, render_papers
from experiments.framework import load_experiment
from jaxkv import files
from jaxkv.cli import CommandOutput, describe_default, parse_options
from jaxkv.report import (
    NOT_JUDGED,
    Claim,
    ReportPart,
    Sheet,
    claim_numbers,
    count_verdicts,
    from_plain,
    name_verdict,
    read_run,
)

RECORDS = Path(__file__).parents[1] / "records"
RESULTS_PAGE = Path(__file__).parents[1] / "RESULTS.md"


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
    config: str
    """Name of its config; "own" if it differs from all shipped ones."""
    folder: str
    """Path relative to the given folder."""
    env: dict[str, Any]
    claims: list[Claim]

    def doubt(self, best: BestTimes) -> str:
        """Returns why the record is unverified, or ""; `best` as in `find_doubt`."""
        name = self.env.get("config") or ("" if self.config == "own" else self.config)
        return find_doubt(self.env, is_timed(self.experiment, name), best)


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


_OF_ENV = {"started_at": str, "duration_s": float, "cpu": str, "commit": str | None}
"""Fields of `env.json` on the page."""


def read_record(run: Path, root: Path) -> ClaimsRecord:
    """Reads one run folder, and judges its claims again from its arrays."""
    try:
        experiment = load_experiment(
            str(files.read_json(run / "env.json")["experiment"])
        )
        saved_run = read_run(run, experiment)
        for name, kind in _OF_ENV.items():
            from_plain(kind, saved_run.env[name], name)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{run}: not a run folder: {error}") from None
    return ClaimsRecord(
        experiment=experiment.name,
        config=saved_run.study.name_of(saved_run.config) or "own",
        folder=run.relative_to(root).as_posix(),
        env=saved_run.env,
        claims=saved_run.claims,
    )


type PageGroup = tuple[str, Callable[[Claim], bool]]
_GROUPS: tuple[PageGroup, ...] = (
    (
        "Published numbers that are not reproduced",
        lambda x: x.kind == "reproduces" and x.verdict == "fails",
    ),
    (
        "Published numbers that their formula or rule does not give",
        lambda x: x.kind == "recomputes" and x.verdict == "fails",
    ),
    (
        "Own checks that fail",
        lambda x: x.kind == "checks" and x.verdict == "fails",
    ),
    (
        "Published numbers that are reproduced",
        lambda x: x.kind == "reproduces" and x.verdict == "holds",
    ),
    (
        "Published numbers that their formula or rule gives",
        lambda x: x.kind == "recomputes" and x.verdict == "holds",
    ),
    ("Published numbers that a fit used", lambda x: x.kind == "calibrated"),
    (
        "Published numbers that cannot be compared",
        lambda x: x.kind == "cannot compare",
    ),
    (
        "Own checks that hold",
        lambda x: x.kind == "checks" and x.verdict == "holds",
    ),
    ("Own checks that cannot be compared", lambda x: True),
)
"""Headings of the page, and the claims below each; a claim is below the first."""


def render_page(records: list[ClaimsRecord]) -> str:
    """Renders the page in Markdown: failing claims first, one line for each claim."""
    best = best_yardsticks(record.env for record in records)
    tables: dict[str, list[str]] = {title: [] for title, _ in _GROUPS}
    for record in records:
        link = f"[{record.folder}](records/{record.folder}/report.md)"
        origin = [link, record.env["started_at"][:10], record.doubt(best)]
        for x in record.claims:
            title = next(title for title, includes in _GROUPS if includes(x))
            is_shown = x.verdict == NOT_JUDGED or x.kind == "calibrated"
            verdict = f"**{name_verdict(x.verdict)}** " if is_shown else ""
            cause = f"**Cause:** {x.cause}" if x.cause else ""
            cells = (
                ", ".join(filter(None, origin)),
                x.claim,
                f"{verdict}{claim_numbers(x)}",
                f"{cause} {x.note}".strip(),
            )
            row = " | ".join(cell.replace("|", "\\|") for cell in cells)
            tables[title].append(f"| {row} |")
    sections = ["# Claims and measured numbers", _first_line(records), _STATUS_LEGEND]
    for title, rows in tables.items():
        if rows:
            head = f"## {title} ({len(rows)})\n"
            sections.append(
                "\n".join(
                    [head, "| record | claim | numbers | |", "|---" * 4 + "|", *rows]
                )
            )
    papers = list_papers({record.folder: record.claims for record in records})
    sections.append(f"## Papers\n\n{render_papers(papers).strip()}")
    rows = [
        "## Records\n",
        "| record | command | date | commit | unverified | seconds | processor |",
    ]
    rows.append("|---" * 7 + "|")
    for record in records:
        env = record.env
        config = record.config
        if config == "own":
            config = f"--config experiments/records/{record.folder}/config.json"
        rows.append(
            f"| [{record.folder}](records/{record.folder}/report.md) "
            f"| `jaxkv run {record.experiment} {config}` "
            f"| {env['started_at'][:10]} "
            f"| `{str(env['commit'])[:8]}` | {record.doubt(best) or '-'} "
            f"| {env['duration_s']:,.0f} | {env['cpu']} |"
        )
    sections.append("\n".join(rows))
    return "\n\n".join(sections) + "\n"


_STATUS_LEGEND = (
    "A reproduced number is the outcome of a simulation or run, none of them on the"
    " publication's machine; a recomputed one is what a formula or the rule of an"
    " algorithm gives. A number that cannot be compared was measured under other"
    " conditions; the note gives the reason, and a direction that the source states is"
    " judged separately. A check is an oracle, an identity or a bar of this project;"
    " its number is expected, not published. `jaxkv claims --write` generates this page"
    " from the arrays of the run folders in `experiments/records`. Each row has the"
    " date of its record, and why its times are unverified: they are, unless a fixed"
    " product, timed with them, took at most 10 % longer than its best. The last table"
    " has commands and commits."
)


def _first_line(records: list[ClaimsRecord]) -> str:
    """Counts verdicts by kind."""
    counts = count_verdicts(claim for record in records for claim in record.claims)
    names = "reproductions", "recomputed", "calibrated", "checks", "directions"
    shown, formulas, fits, checks, ways = (counts[x] for x in names)
    directions = f"{ways['holds']} hold, {ways['fails']} fail"
    if undecided := sum(ways.values()) - ways["holds"] - ways["fails"]:
        directions += f", {undecided} are not decided"
    parts = [
        f"Reproductions ({sum(shown.values())}): {shown['holds']} hold,"
        f" {shown['fails']} fail, {shown['differs']} cannot be compared"
        f" (directions that their sources state: {directions})",
        f"Recomputed ({sum(formulas.values())}): {formulas['holds']} hold,"
        f" {formulas['fails']} fail",
        f"Calibrated ({sum(fits.values())}): {_plain_counts(fits)}",
        f"Own checks ({sum(checks.values())}): {_plain_counts(checks)}",
    ]
    if skipped := sum(x.get(NOT_JUDGED, 0) for x in counts.values()):
        parts.append(f"Not judged, smoke: {skipped}")
    return ". ".join(parts) + "."


def _plain_counts(counts: dict[str, int]) -> str:
    return (
        f"{counts['holds']} hold, {counts['fails']} fail,"
        f" {counts['differs']} cannot be compared"
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
    lines = [_first_line(records)]
    if write is not None:
        files.write_atomically(write, render_page(records))
        lines.append(f"page: {write}")
    keys = ("experiment", "config", "folder", "claims")
    document = [{name: getattr(x, name) for name in keys} for x in records]
    counts = count_verdicts(claim for record in records for claim in record.claims)
    sheets: list[ReportPart] = [
        Sheet(
            x.folder,
            ("verdict", "kind", "claim", "numbers"),
            [
                (name_verdict(c.verdict), c.kind, c.claim, claim_numbers(c))
                for c in x.claims
            ],
        )
        for x in records
        if x.claims
    ]
    return CommandOutput({"counts": counts, "records": document}, sheets, lines)
