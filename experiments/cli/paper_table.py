"""Figures and tables of the papers of the lectures, with the status of each."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from jaxkv import files
from jaxkv.report import NOT_JUDGED, Claim

PAPERS = Path(__file__).parents[1] / "papers.toml"

FigureStatus = Literal[
    "reproduced", "recomputed", "partly", "not", "cannot be compared", "not tried"
]
_LABELS = re.compile(r"\b(figure|table)s? ([A-Z]?\d\w*(?:(?:, | and )[A-Z]?\d\w*)*)")


class FigureRow(NamedTuple):
    """A figure or table, or a range of them without claims."""

    label: str
    content: str
    status: FigureStatus
    note: str
    """Reason if it is not tried; verdicts on directions if it cannot be compared."""
    records: list[str]


class Paper(NamedTuple):
    """A paper; `is_unlisted` is True if it may have further figures and tables."""

    source: str
    title: str
    is_unlisted: bool
    rows: list[FigureRow]


def figure_labels(source: str) -> list[str]:
    """Returns the labels of figures and tables that the source of a claim names."""
    groups = _LABELS.findall(source)
    return [f"{kind} {x}" for kind, y in groups for x in re.split(", | and ", y)]


def judge_figure(claims: Iterable[Claim]) -> tuple[FigureStatus, str]:
    """Returns the status of a figure by its claims, and verdicts on directions."""
    judged = [claim for claim in claims if claim.verdict != NOT_JUDGED]
    kinds = ("reproduces", "recomputes")
    decided = [claim for claim in judged if claim.kind in kinds]
    held = [claim.verdict == "holds" for claim in decided]
    if held and all(held):
        is_run = any(claim.kind == "reproduces" for claim in decided)
        return ("reproduced" if is_run else "recomputed"), ""
    if held:
        return ("partly" if any(held) else "not"), ""
    compared = [claim for claim in judged if claim.kind == "cannot compare"]
    directions = sorted({claim.direction for claim in compared if claim.direction})
    note = f"direction {' and '.join(directions)}" if directions else ""
    return ("cannot be compared" if compared else "not tried"), note


def list_papers(claims_by_record: Mapping[str, list[Claim]]) -> list[Paper]:
    """Returns the papers of `papers.toml`; claims are given by the record's folder."""
    document = tomllib.loads(files.read_text(PAPERS))
    claims = [(name, x) for name, listed in claims_by_record.items() for x in listed]
    papers = []
    for entry in document["papers"]:
        published = [x for x in claims if x[1].source.startswith(entry["paper"])]
        rows = []
        for label, value in entry.get("figures", {}).items():
            *reasons, content = [value] if isinstance(value, str) else value
            named = [x for x in published if label in figure_labels(x[1].source)]
            status, note = judge_figure(claim for _, claim in named)
            if status == "not tried":
                note = "".join(document["reasons"][key] for key in reasons)
            records = list(dict.fromkeys(folder for folder, _ in named))
            rows.append(FigureRow(label, content, status, note, records))
        papers.append(Paper(entry["paper"], entry["title"], "unlisted" in entry, rows))
    return papers


def render_papers(papers: Iterable[Paper]) -> str:
    """Renders a table per paper in Markdown, each after a line of counts."""
    lines = []
    for paper in papers:
        counts: Counter[FigureStatus] = Counter()
        rows = ["", "| | content | status | records |", "|---|---|---|---|"]
        for label, content, status, note, records in paper.rows:
            ends = [int(number) for number in re.findall(r"\d+", label)]
            counts[status] += ends[-1] - ends[0] + 1
            verdict = f"**{status}**" + (f": {note}" if note else "")
            rows.append(f"| {label} | {content} | {verdict} | {', '.join(records)} |")
        shown = [f"{counts[x]} {x}" for x in get_args(FigureStatus) if counts[x]]
        line = f"Figures and tables ({counts.total()}): {', '.join(shown) or 'none'}."
        line += " The list may be incomplete." if paper.is_unlisted else ""
        lines += [f"### {paper.source}: {paper.title}", "", line]
        lines += [*rows, ""] if paper.rows else [""]
    return "\n".join(lines)
