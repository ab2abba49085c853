"""Fits and predictions of public tables of servers, with signed errors by group."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxkv.progress import QUIET, Progress
from jaxkv.validation import ConfigRecord
from scaling.calibration import (
    ENERGY_DISCREPANCY,
    INTERVAL_HALF,
    POWER_DISCREPANCY,
    TAIL_DISCREPANCY,
    LoopCalibration,
    MeasuredServer,
    ServerPrediction,
    ServerTable,
    calibrate_loops,
    digest_split,
    find_implausible_servers,
    find_outside_sizes,
    format_loops,
    predict_roofline,
    predict_servers,
    rank_rows,
    read_measured_servers,
    sizes_of_server,
    split_servers,
)
from scaling.cli.calibrate.server_results import (
    FIRST_TOKEN_TIME,
    TAILS,
    TIME_PER_TOKEN,
    TOKEN_ENERGY,
    WATTS,
    NextRows,
    PooledEffects,
    PredictedServers,
    Refusals,
    ServerTablesResult,
)
from scaling.cli.calibrate.study import check_leave_out, find_published

_NUM_NEXT = 3
PUBLIC_TABLES = ("servers2026/aic_servers.csv", "servers2026/mlenergy_servers.csv")
"""Files of public rows in the folder that JAXKV_DATA names."""


class ServerTablesConfig(ConfigRecord):
    """Tables of measured servers, and what the fits leave out."""

    tables: tuple[str, ...] = ()
    """CSV of servers that are fitted; empty for those of the folder servers2026 in the
    folder that the environment variable JAXKV_DATA names."""
    predict: tuple[str, ...] = ()
    """CSV of servers that are predicted by the fit to all rows of `tables`."""
    leave_out: tuple[Literal["none", "model", "developer"], ...] = ("none",)
    """Rows that a fit leaves out and predicts: none, all of a model (checkpoints of one
    shape are one), or all of a developer."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        check_leave_out(self.leave_out, "none, model, developer")


class _Tables(NamedTuple):
    servers: list[MeasuredServer]
    refusals: list[tuple[str, str, str]]


def predict_server_tables(
    config: ServerTablesConfig, progress: Progress = QUIET
) -> ServerTablesResult:
    """Fits the rows of tables, and predicts those left out and those of other tables.

    Raises:
      ValueError: a table cannot be read, or has no row that can be fitted.
    """
    tables = _read_tables(find_public_tables(config.tables))
    fitted = tables.servers
    refusals = tables.refusals
    rows: list[tuple[object, ...]] = []
    effects: list[tuple[object, ...]] = []
    next_rows: list[tuple[object, ...]] = []
    server = ""
    folds = [
        (kind, fold)
        for kind in config.leave_out
        if kind != "none"
        for fold in split_servers(fitted, kind)
    ]
    for kind, fold in progress.track(folds, "left out", "fits"):
        if not fold.fitted:
            raise ValueError(f"leave_out={kind!r} needs rows of more than one {kind}")
        mixtures = [x.model.experts is not None for x in fold.held_out]
        calibration = calibrate_loops(
            fold.fitted, has_dense=not all(mixtures), has_mixtures=any(mixtures)
        )
        rows += server_rows(fold.held_out, calibration, kind, fold.name)
    if "none" in config.leave_out or config.predict:
        calibration = calibrate_loops(fitted)
        effects = [*_effect_rows(calibration)]
        server = format_loops(calibration)
        if "none" in config.leave_out:
            rows += server_rows(fitted, calibration, "none", "")
        for path in config.predict:
            table = read_measured_servers(path)
            refusals += refusal_rows(path, table)
            rows += server_rows(table.servers, calibration, "table", path)
            next_rows += rank_next_rows(table.servers, calibration)
    return ServerTablesResult(
        predictions=PredictedServers.of(rows),
        refusals=Refusals.of(refusals),
        effects=PooledEffects.of(effects),
        next_rows=NextRows.of(next_rows),
        split=digest_split(fitted),
        num_fitted=len(fitted),
        server=server,
    )


def rank_next_rows(
    servers: Sequence[MeasuredServer], calibration: LoopCalibration
) -> Iterator[tuple[object, ...]]:
    """Yields the rows of `NextRows` for the server with the widest interval."""
    predicted = predict_servers(servers, calibration)
    width = np.log(predicted.high_s / predicted.low_s)[:, 0]
    target = servers[int(width.argmax())]
    candidates = [
        dataclasses.replace(
            target,
            concurrency=max(1.0, share * target.concurrency),
            prompt_tokens=max(1.0, longer * target.prompt_tokens),
            answer_tokens=max(1.0, longer * target.answer_tokens),
            is_median_step=False,
        )
        for share in (1 / 16, 1 / 4, 1.0)
        for longer in (1 / 4, 1.0)
    ]
    for gain in rank_rows(target, candidates, calibration)[:_NUM_NEXT]:
        x = gain.server
        sizes = (x.concurrency, x.prompt_tokens, x.answer_tokens)
        yield target.name, *sizes, *gain.widths


def find_public_tables(names: Sequence[str]) -> tuple[Path, ...]:
    """Returns the paths of tables, by default of the public ones.

    Raises:
      ValueError: there is no name, and the environment variable is not set.
    """
    return tuple(map(Path, names)) or find_published("tables=()", PUBLIC_TABLES)


def server_rows(
    servers: Sequence[MeasuredServer],
    calibration: LoopCalibration,
    left_out: str,
    fold: str,
) -> Iterator[tuple[object, ...]]:
    """Yields the rows of `PredictedServers` for servers."""
    predicted: ServerPrediction = predict_servers(servers, calibration)
    latencies = (predicted.low_s, predicted.median_s, predicted.high_s)
    watts = _interval(predicted.watts, POWER_DISCREPANCY)
    joules = _interval(predicted.token_joules, ENERGY_DISCREPANCY)
    tails = _interval(predicted.tail_s, np.array(TAIL_DISCREPANCY))
    rooflines = predict_roofline(servers)
    for i, server in enumerate(servers):
        fitted_sizes = calibration.fit_of(server).sizes
        outside = find_outside_sizes(fitted_sizes, sizes_of_server(server))
        place = (
            *(left_out, fold, server.name, server.model.name),
            "dense" if server.model.experts is None else "mixture",
            *(server.device.name, server.engine, server.weight_format),
            *(server.num_devices, server.concurrency, server.prompt_tokens),
            *(server.answer_tokens, predicted.num_running[i], ", ".join(outside)),
        )
        token_s, first_s = rooflines[i]
        numbers = (
            (TIME_PER_TOKEN, server.token_s, token_s, *(x[i, 0] for x in latencies)),
            (
                *(FIRST_TOKEN_TIME, server.first_token_s, first_s),
                *(x[i, 1] for x in latencies),
            ),
            *(
                (name, measured, np.nan, *(x[i, at] for x in tails))
                for at, (name, measured) in enumerate(
                    zip(TAILS, server.token_tail_s or (None,) * 3, strict=True)
                )
            ),
            (WATTS, server.watts, np.nan, *(x[i] for x in watts)),
            (TOKEN_ENERGY, server.token_joules, np.nan, *(x[i] for x in joules)),
        )
        for name, measured, roofline, *quantiles in numbers:
            if server.is_median_step and name == FIRST_TOKEN_TIME:
                continue  # the prompts' lengths are not in the table
            if np.isfinite(quantiles).all():
                real = np.nan if measured is None else measured
                yield *place, name, real, roofline, *quantiles


def _interval(median: np.ndarray, spread: float | np.ndarray) -> tuple[np.ndarray, ...]:
    factor = np.exp(INTERVAL_HALF * spread)
    return median / factor, median, median * factor


def _read_tables(paths: Sequence[Path]) -> _Tables:
    servers = []
    refusals = []
    for path in paths:
        table = read_measured_servers(path)
        implausible = find_implausible_servers(table.servers)
        dropped = {*map(id, implausible)}
        measured = [x for x in table.servers if x.token_s is not None]
        servers += [x for x in measured if id(x) not in dropped]
        refusals += refusal_rows(path, table)
        reason = "implies more than a server's share of the peak of products"
        refusals += [(path.name, x.name, reason) for x in implausible]
    if not servers:
        raise ValueError(f"{paths[0]}: no row has a time per token that can be fitted")
    return _Tables(servers, refusals)


def refusal_rows(
    path: str | Path, table: ServerTable
) -> Iterator[tuple[str, str, str]]:
    """Yields table, name and reason of each row that is not read."""
    for name, reason in table.refusals:
        yield Path(path).name, name, reason


def _effect_rows(calibration: LoopCalibration) -> Iterator[tuple[object, ...]]:
    if calibration.power is not None:
        for name, value in calibration.power._asdict().items():
            yield "power", "shared", "all", name, value, 0.0
    fits = {"dense": calibration.dense, "mixture": calibration.mixture}
    for name, fit in fits.items():
        for row in fit.rows() if fit is not None else ():
            yield name, *row
