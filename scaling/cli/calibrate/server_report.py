"""Reports of fits and predictions of tables of servers."""

import json
from pathlib import Path

import numpy as np

from jaxkv.cli import CommandOutput
from jaxkv.plotting import (
    BLUE,
    GREEN,
    RED,
    Panels,
    colors,
    render_figure,
    set_labels,
)
from jaxkv.report import (
    Sheet,
    Study,
    numbered_list,
    part_to_markdown,
    write_files,
)
from scaling.calibration import (
    DETERMINED_SPREAD,
    digest_split,
    load_loops,
    read_measured_servers,
)
from scaling.cli.calibrate.published_errors import published_sheet
from scaling.cli.calibrate.server_results import (
    QUANTITIES,
    NextRows,
    PooledEffects,
    PredictedServers,
    Refusals,
    ServerTablesResult,
)
from scaling.cli.calibrate.server_tables import (
    ServerTablesConfig,
    predict_server_tables,
    rank_next_rows,
    refusal_rows,
    server_rows,
)


def plot(axes: np.ndarray, result: ServerTablesResult) -> None:
    """Draws the signed errors of each model, by latency."""
    kind = result.predictions.distinct("left_out")[0]
    shown = result.predictions.where(left_out=kind)
    for ax, quantity in zip(axes, QUANTITIES, strict=False):
        table = result.group_errors(kind, "model").where(quantity=quantity)
        names = table.group.tolist()
        look = {"dense": RED, "mixture": BLUE, "both": GREEN}
        for i, name in enumerate(names):
            part = shown.where(quantity=quantity, model=name)
            error = part.error[np.isfinite(part.error)]
            color = colors()[look[str(table.kind[i])]]
            low, middle, high = 100 * np.quantile(error, [0.05, 0.5, 0.95])
            ax.hlines(-i, low, high, color=color, linewidth=1.5)
            ax.plot(middle, -i, "o", color=color, markersize=4)
        ax.axvline(0.0, linewidth=0.5)
        ax.set_yticks([-i for i in range(len(names))], names)
        set_labels(ax, f"{quantity}, worst first", "error, 5 to 95 % of rows [%]", "")
        for name in dict.fromkeys(table.kind.tolist()):
            ax.plot([], [], "o", color=colors()[look[name]], label=name)
        ax.legend()


def metrics(result: ServerTablesResult) -> dict[str, object]:
    """Returns errors by group, refusals and the digest of the split."""
    errors = [
        {"left_out": kind, "by": by, **row}
        for kind in result.predictions.distinct("left_out")
        for by in ("model", "device", "engine", "kind")
        for row in result.group_errors(kind, by).rows()
    ]
    return {
        "errors": errors,
        "refusals": result.refusals.rows(),
        "effects": result.effects.rows(),
        "next_rows": result.next_rows.rows(),
        "split": result.split,
        "num_fitted": result.num_fitted,
    }


_TITLES = {
    "none": "fitted rows",
    "model": "model left out",
    "developer": "developer left out",
    "table": "rows of another table",
}


def summary(result: ServerTablesResult) -> list[Sheet]:
    """Returns errors by model, device, engine and kind, and the refused rows."""
    parts: list[Sheet] = []
    for kind in result.predictions.distinct("left_out"):
        for by in ("model", "device", "engine", "kind"):
            errors = result.group_errors(kind, by)
            if len(errors):
                parts.append(errors.sheet(f"{_TITLES[kind]}: errors by {by}"))
    if any(np.isfinite(result.predictions.error)):
        parts.append(published_sheet())
    unmeasured = result.predictions.where(left_out="table")
    unmeasured = unmeasured.at(np.isnan(unmeasured.measured))
    if len(unmeasured):
        parts.append(_prediction_sheet(unmeasured))
    if len(result.refusals):
        parts.append(result.refusals.sheet_of_reasons())
    if len(result.effects):
        effects = result.effects
        is_shared = effects.kind == "shared"
        note = f"Data determine a value whose spread is below {DETERMINED_SPREAD:g}."
        parts.append(effects.at(is_shared).sheet("coefficients", note=note))
        parts.append(effects.at(~is_shared).sheet("effects: factors on coefficients"))
    if len(result.next_rows):
        note = (
            "Rows of the server whose prediction is widest, and the width of its 90 % "
            "interval after one of them is measured, over that of today."
        )
        parts.append(result.next_rows.sheet("measure next", note=note))
    outside = result.predictions.where(left_out="table")
    outside = outside.at(outside.outside != "")
    if len(outside):
        pairs = zip(outside.server.tolist(), outside.outside.tolist(), strict=True)
        lines = [
            f"{name}: {sizes} outside the fitted ones"
            for name, sizes in dict(pairs).items()
        ]
        parts.append(numbered_list("warnings: intervals are wider", lines))
    return parts


_PRINTED_SERVERS = 40


def _prediction_sheet(predictions: PredictedServers) -> Sheet:
    """Returns a line for each of the first servers, with intervals of 90 %."""
    rows: dict[str, dict[str, str]] = {}
    for row in predictions.rows():
        low, middle, high = (row[x] for x in ("low", "predicted", "high"))
        cell = f"{middle:.3g} ({low:.3g} to {high:.3g})"
        rows.setdefault(row["server"], {})[row["quantity"]] = cell
    shown = [x for x in QUANTITIES if any(x in row for row in rows.values())]
    heads = ("server", *(f"{x} [{QUANTITIES[x]}]" for x in shown))
    cells = [
        (name, *(row.get(x, "-") for x in shown))
        for name, row in list(rows.items())[:_PRINTED_SERVERS]
    ]
    note = (
        "Medians and 90 % intervals of the quantities without measured values, for "
        f"{len(cells)} of {len(rows)} servers; prediction.json in the folder has all."
    )
    return Sheet("predictions", heads, cells, note)


def files(result: ServerTablesResult) -> dict[str, str]:
    """Returns predictions of other tables, and the fits to all rows, as JSON."""
    contents = {"server.json": result.server} if result.server else {}
    rows = result.predictions.where(left_out="table").rows()
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float) and not np.isfinite(value):
                row[name] = None
    text = json.dumps(rows, indent=1, default=_to_number)
    return contents | ({"prediction.json": text} if rows else {})


def _to_number(value: np.generic) -> object:
    return value.item()


SERVER_TABLES = Study(
    configs={"servers": ServerTablesConfig()},
    result=ServerTablesResult,
    run=predict_server_tables,
    plot=plot,
    metrics=metrics,
    summary=summary,
    panels=Panels(1, 2, 4.5),
    files=files,
)
"""Fits and predictions of tables of servers, as a run folder."""
TABLES_QUESTION = "How far are predictions of public servers off that no fit has seen?"


def report_server_table(
    path: Path, fit: Path, *, out: Path | None, has_figure: bool
) -> CommandOutput:
    """Predicts the rows of a table with a saved fit, and reports signed errors.

    Args:
      path: the table.
      fit: file of a fit of tables.
      out: folder for report.md, prediction.json and the figure; None for none, with a
        figure for a new one under runs/.
      has_figure: True to draw the figure.

    Raises:
      ValueError: the table or the fit cannot be read.
    """
    calibration = load_loops(fit)
    table = read_measured_servers(path)
    result = ServerTablesResult(
        predictions=PredictedServers.of(
            server_rows(table.servers, calibration, "table", path.name)
        ),
        refusals=Refusals.of(refusal_rows(path, table)),
        effects=PooledEffects.of([]),
        next_rows=NextRows.of(rank_next_rows(table.servers, calibration)),
        split=digest_split(table.servers),
        num_fitted=0,
        server="",
    )
    document = metrics(result)
    parts = summary(result)
    fits = (calibration.dense, calibration.mixture)
    models = {model for x in fits if x is not None for model in x.models}
    num_seen = sum(x.model.name in models for x in table.servers)
    lines = [
        f"{num_seen:,} of {len(table.servers):,} rows are of models that "
        f"{fit.name} was fitted to; jaxkv calibrate TABLE --leave-out model has errors "
        "of models that no fit saw"
    ]
    if has_figure or out is not None:
        sections = [f"# Signed errors of {path.name}", lines[0] + "."]
        contents: dict[str, str | bytes] = {**files(result)}
        if has_figure:
            sections.append("![figure](figure.png)")
            contents |= render_figure(
                lambda axes: plot(axes, result), panels=(1, 2), size_inches=(3.4, 4.5)
            )
        sections += map(part_to_markdown, parts)
        contents["report.md"] = "\n\n".join(sections) + "\n"
        document["out"] = write_files(out, "simulate", contents)
        lines.append(f"folder: {document['out']}")
    return CommandOutput(document, parts, lines)
