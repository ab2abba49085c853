"""Metrics and claims as tables: for a terminal, and as Markdown for the report."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments import documents
from experiments.claims import Claim


class Sheet(NamedTuple):
    """A table of text.

    Attributes:
      title: what it shows, may be empty.
      columns: the heads.
      rows: the cells, one per head in each row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


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
        rows = [(name, cell(value)) for name, value in plain.items()]
        sheets.append(Sheet("", ("metric", "value"), rows))
    if columns:
        names = dict.fromkeys(name for column in columns.values() for name in column)
        rows = [
            (name, *(cell(column.get(name, "")) for column in columns.values()))
            for name in names
        ]
        sheets.append(Sheet("", ("metric", *columns), rows))
    for title, items in lists.items():
        names = dict.fromkeys(name for item in items for name in item)
        rows = [tuple(cell(item.get(name, "")) for name in names) for item in items]
        sheets.append(Sheet(title, tuple(names), rows))
    return sheets


def claim_sheet(claims: Sequence[Claim]) -> Sheet:
    """Lays out claims as a table, one row each."""
    signs = {"equal": "", "at_least": "≥ ", "at_most": "≤ "}
    rows = [
        (
            x.claim,
            x.source,
            f"{signs[x.relation]}{cell(x.published)} {x.unit}",
            f"{cell(x.ours)} {x.unit}",
            cell(x.tolerance),
            x.verdict,
            x.note,
        )
        for x in claims
    ]
    heads = ("claim", "source", "published", "ours", "tolerance", "verdict", "note")
    return Sheet("claims", heads, rows)


def cell(value: Any) -> str:
    """Writes a value short: four significant digits, whole numbers in full."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def report(
    question: str,
    config: Any,
    env: dict[str, Any],
    claims: Sequence[Claim],
    metrics: dict[str, Any],
) -> str:
    """Writes a run's report in Markdown.

    Args:
      question: what the experiment asks.
      config: its config, a dataclass.
      env: the content of `env.json`.
      claims: its claims.
      metrics: its metrics, as `metric_sheets` takes them.
    """
    machine = ", ".join([env["cpu"], f"{env['num_cpus']} cores", *env["devices"]])
    versions = ", ".join(f"{name} {x}" for name, x in env["versions"].items())
    parts = [
        f"# {question}",
        f"`{env['experiment']}`, {env['started_at']}, {env['duration_s']:.1f} s. "
        f"{machine}. {versions}. Commit {env['commit'] or 'unknown'}.",
    ]
    if env["interrupted"]:
        parts.append("**Interrupted before its end; this is what it had by then.**")
    parts.append("![figure](figure.svg)")
    parts += [_markdown(sheet) for sheet in metric_sheets(documents.plain(metrics))]
    if claims:
        parts.append(_markdown(claim_sheet(claims)))
    parts.append(f"## config\n\n```json\n{documents.config_dumps(config)}\n```")
    return "\n\n".join(parts) + "\n"


def _markdown(sheet: Sheet) -> str:
    lines = [f"## {sheet.title}", ""] if sheet.title else []
    for row in (sheet.columns, ["---"] * len(sheet.columns), *sheet.rows):
        cells = (text.replace("|", "\\|").replace("\n", " ") for text in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
