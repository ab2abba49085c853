"""Reports of a run: tables, texts and claims, rendered as Markdown."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxkv.report import plain_json, units
from jaxkv.report.claims import Claim, claim_numbers, group_heads, name_verdict

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Sheet(NamedTuple):
    """A table of text cells.

    Attributes:
      title: title, may be empty.
      columns: column headings.
      rows: cells, one per heading in each row.
      note: sentence below the table, may be empty.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def paragraph(title: str, text: str) -> Sheet:
    """Returns a text under a title."""
    return Sheet(title, ("",), [(text,)])


def numbered_list(title: str, lines: Sequence[str]) -> Sheet:
    """Returns numbered sentences under a title."""
    return Sheet(title, ("", ""), [(f"{i}.", line) for i, line in enumerate(lines, 1)])


class Excerpts(NamedTuple):
    """Prompts given to a model, and the continuations that it wrote.

    Attributes:
      title: title.
      pairs: prompt and continuation.
    """

    title: str
    pairs: Sequence[tuple[str, str]]


class Verdicts(NamedTuple):
    """Judged claims of a run."""

    claims: Sequence[Claim]


ReportPart = Sheet | Excerpts | Verdicts


def metric_sheets(metrics: Mapping[str, object]) -> list[Sheet]:
    """Converts metrics to tables.

    Args:
      metrics: numbers and strings by name. Each nested dict becomes a column, so that
        dicts with equal keys share a table; each list of dicts becomes a table with one
        row per dict.

    Returns:
      Tables: plain values first, then the columns, then one table per list.
    """
    sheets = []
    columns = {key: value for key, value in metrics.items() if isinstance(value, dict)}
    lists = {key: value for key, value in metrics.items() if isinstance(value, list)}
    plain = {k: v for k, v in metrics.items() if k not in columns and k not in lists}
    if plain:
        rows = [units.format_named(name, value) for name, value in plain.items()]
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
    rows: Sequence[Mapping[str, object]],
    columns: Mapping[str, str],
    note: str = "",
) -> Sheet:
    """Returns a table of dicts of numbers and strings.

    Args:
      title: title of the table.
      rows: one dict per row.
      columns: key of each column by heading; the key's suffix gives the unit.
      note: sentence below the table.
    """
    cells = [
        [
            units.format_named(name, plain_json.to_plain(row[name]))[1]
            for name in columns.values()
        ]
        for row in rows
    ]
    return Sheet(title, [*columns], cells, note)


def render_report(
    question: str,
    config: "DataclassInstance",
    env: dict[str, Any],
    parts: Sequence[ReportPart],
) -> str:
    """Renders the report of a run in Markdown.

    Args:
      question: research question of the experiment.
      config: config of the run.
      env: content of `env.json`.
      parts: tables, texts and claims.
    """
    machine = ", ".join([env["cpu"], f"{env['num_cpus']} cores", *env["devices"]])
    versions = ", ".join(f"{name} {x}" for name, x in env["versions"].items())
    sections = [
        f"# {question}",
        f"`{env['experiment']}`, {env['started_at']}, {env['duration_s']:.1f} s. "
        f"{machine}. {versions}. Commit {env['commit'] or 'unknown'}.",
    ]
    if "yardstick_s" in env:  # made by `jaxkv records`
        loads = env["load_average"]
        times_ms = [1e3 * x for x in env["yardstick_s"]]
        sections.append(
            f"Load average {min(loads):.1f} to {max(loads):.1f}; a fixed product of "
            f"matrices took {min(times_ms):.1f} to {max(times_ms):.1f} ms."
        )
    if env["status"] == "interrupted":
        sections.append("**Interrupted: partial result.**")
    sections.append("![figure](figure.png)")
    sections += map(part_to_markdown, parts)
    sections.append(f"## config\n\n```json\n{plain_json.config_dumps(config)}\n```")
    return "\n\n".join(sections) + "\n"


def _row(name: str, items: list[dict[str, object]]) -> tuple[str, ...]:
    """Returns the label of a metric, and its cell for each dict."""
    pairs = [
        units.format_named(name, item[name]) if name in item else None for item in items
    ]
    # Only a number shows that the name has a unit suffix; values may be missing.
    label = min((pair[0] for pair in pairs if pair), key=len)
    return label, *(pair[1] if pair else "" for pair in pairs)


def part_to_markdown(part: ReportPart) -> str:
    """Renders a part of a report in Markdown."""
    if isinstance(part, Excerpts):
        blocks = [
            f"Given:\n\n{_fenced(prompt)}\n\nWritten:\n\n{_fenced(wrote)}"
            for prompt, wrote in part.pairs
        ]
        return "\n\n".join([f"## {part.title}", *blocks])
    if isinstance(part, Verdicts):
        blocks = ["## claims"]
        for head, claims in group_heads(part.claims).items():
            items = (
                f"* **{name_verdict(x.verdict)}**: {x.claim};"
                f" {claim_numbers(x)}. {x.note}".split()
                for x in claims
            )
            blocks += [f"{head[0].upper()}{head[1:]}.", "\n".join(map(" ".join, items))]
        return "\n\n".join(blocks)
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
