"""What a run says to a person: tables, texts and claims; and as Markdown for a file."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.framework import config_json, units
from experiments.framework.claims import Claim


class Sheet(NamedTuple):
    """A table of text.

    Attributes:
      title: what it shows, may be empty.
      columns: the heads.
      rows: the cells, one per head in each row.
      note: a sentence below it, may be empty.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def paragraph(title: str, text: str) -> Sheet:
    """Lays out a text under a title."""
    return Sheet(title, ("",), [(text,)])


def numbered(title: str, lines: Sequence[str]) -> Sheet:
    """Lays out sentences, each with its number."""
    return Sheet(title, ("", ""), [(f"{i}.", line) for i, line in enumerate(lines, 1)])


class Excerpts(NamedTuple):
    """Texts that a model was given, and how it went on; both of several lines.

    Attributes:
      title: what they are.
      pairs: given and written.
    """

    title: str
    pairs: Sequence[tuple[str, str]]


class Verdicts(NamedTuple):
    """Claims and what became of them."""

    claims: Sequence[Claim]


Part = Sheet | Excerpts | Verdicts


def metric_sheets(metrics: dict[str, Any]) -> list[Sheet]:
    """Lays out metrics as tables.

    Args:
      metrics: numbers and strings by name; a dict inside is a column of its own, so
        that several with the same keys stand side by side; a list of dicts is a
        table with a row for each.

    Returns:
      The tables: plain values first, then the columns, then one per list.
    """
    sheets = []
    columns = {key: value for key, value in metrics.items() if isinstance(value, dict)}
    lists = {key: value for key, value in metrics.items() if isinstance(value, list)}
    plain = {k: v for k, v in metrics.items() if k not in columns and k not in lists}
    if plain:
        rows = [units.named(name, value) for name, value in plain.items()]
        sheets.append(Sheet("", ("metric", "value"), rows))
    if columns:
        names = dict.fromkeys(name for column in columns.values() for name in column)
        rows = [_row(name, list(columns.values())) for name in names]
        sheets.append(Sheet("", ("metric", *columns), rows))
    for title, items in lists.items():
        names = dict.fromkeys(name for item in items for name in item)
        turned = [_row(name, items) for name in names]
        heads = [label for label, *_ in turned]
        rows = list(zip(*(cells for _, *cells in turned), strict=True))
        sheets.append(Sheet(title, heads, rows))
    return sheets


def row_sheet(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    note: str = "",
) -> Sheet:
    """Lays out rows, dicts of numbers and strings.

    `columns` has by heading the name of what stands below, which tells its unit.
    """
    cells = [
        [
            units.named(name, config_json.plain(row[name]))[1]
            for name in columns.values()
        ]
        for row in rows
    ]
    return Sheet(title, [*columns], cells, note)


def claim_numbers(claim: Claim) -> str:
    """Says ours, and what was published where, in a sentence."""
    unit = "" if claim.unit == "1" else f" {claim.unit}"
    bound = {"equal": "", "at_least": "at least ", "at_most": "at most "}
    slack = (
        f", to within {units.cell(claim.tolerance)}{unit}" if claim.tolerance else ""
    )
    return (
        f"ours {units.cell(claim.ours)}{unit}, "
        f"published {bound[claim.relation]}{units.cell(claim.published)}{unit}{slack} "
        f"({claim.source})"
    )


def report(
    question: str,
    config: Any,
    env: dict[str, Any],
    parts: Sequence[Part],
) -> str:
    """Writes a run's report in Markdown; `env` is the content of `env.json`."""
    machine = ", ".join([env["cpu"], f"{env['num_cpus']} cores", *env["devices"]])
    versions = ", ".join(f"{name} {x}" for name, x in env["versions"].items())
    said = [
        f"# {question}",
        f"`{env['experiment']}`, {env['started_at']}, {env['duration_s']:.1f} s. "
        f"{machine}. {versions}. Commit {env['commit'] or 'unknown'}.",
    ]
    if env["status"] == "interrupted":
        said.append("**Interrupted before its end; this is what it had by then.**")
    said.append("![figure](figure.svg)")
    said += map(markdown, parts)
    said.append(f"## config\n\n```json\n{config_json.config_dumps(config)}\n```")
    return "\n\n".join(said) + "\n"


def _row(name: str, items: list[dict[str, Any]]) -> tuple[str, ...]:
    """A metric's label, and its cell in each of some dicts."""
    pairs = [units.named(name, item[name]) if name in item else None for item in items]
    # A number alone tells that a name ends in a unit; some may be missing.
    label = min((pair[0] for pair in pairs if pair), key=len)
    return label, *(pair[1] if pair else "" for pair in pairs)


def markdown(part: Part) -> str:
    """Writes a part of a report in Markdown."""
    if isinstance(part, Excerpts):
        blocks = [
            f"Given:\n\n{_fenced(given)}\n\nWritten:\n\n{_fenced(wrote)}"
            for given, wrote in part.pairs
        ]
        return "\n\n".join([f"## {part.title}", *blocks])
    if isinstance(part, Verdicts):
        items = [
            " ".join(
                f"* **{x.verdict}**: {x.claim}; {claim_numbers(x)}. {x.note}".split()
            )
            for x in part.claims
        ]
        return "\n".join(["## claims", "", *items])
    lines = [f"## {part.title}", ""] if part.title else []
    for row in (part.columns, ["---"] * len(part.columns), *part.rows):
        cells = (text.replace("|", "\\|").replace("\n", " ") for text in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", part.note] if part.note else lines)


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
