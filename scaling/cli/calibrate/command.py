"""`jaxkv calibrate`: fits a server's step times to measured stages or servers."""

import itertools

from jaxkv import files
from jaxkv.cli import CommandOutput, is_word, parse_changes, run_study
from jaxkv.files import read_table
from jaxkv.report import Experiment
from scaling.calibration import find_server_form
from scaling.cli.calibrate.server_tables import (
    SERVER_TABLES,
    TABLES_QUESTION,
    ServerTablesConfig,
)
from scaling.cli.calibrate.study import QUESTION, STUDY, CalibrationConfig


def main(args: list[str]) -> CommandOutput:
    """Runs `calibrate RUNS [OPTIONS]`; `--out FILE.json` keeps only the coefficients.

    Tables of servers in the form of AIConfigurator or ML.ENERGY are fitted together,
    see `server_tables`.

    Raises:
      ValueError: RUNS is missing, or an option is invalid.
    """
    tables = list(itertools.takewhile(lambda x: not x.startswith("-"), args))
    if tables and find_server_form(read_table(tables[0], allow_partial=False).names):
        return _calibrate_tables(tables, args[len(tables) :])
    if not is_word(args) and not {"-h", "--help"} & {*args}:
        raise ValueError("RUNS is missing: a CSV of measured load stages")
    runs = args[0] if is_word(args) else ""
    config, out, max_seconds = parse_changes(
        CalibrationConfig(runs=runs),
        args[1:] if runs else args,
        "jaxkv calibrate RUNS",
        "RUNS is a CSV of load stages of servers, as their clients measured them. "
        "Tables of AIConfigurator or ML.ENERGY have their own options: TABLE --help.",
        "a new one under runs/; FILE.json writes only the coefficients there",
    )
    file = out if out is not None and out.suffix == ".json" else None
    if file is not None and "none" not in config.leave_out:
        line = f"leave_out={config.leave_out!r} writes no coefficients"
        raise ValueError(f"--out {file}: {line}")
    experiment = Experiment("calibration", QUESTION, (STUDY,))
    answer = run_study(experiment, config, None if file else out, max_seconds)
    server = answer.document["out"] / "server.json"
    if file is not None and server.is_file():
        files.write_atomically(file, files.read_text(server))
        answer.lines.append(f"coefficients: {file}")
    return answer.lift_metrics()


def _calibrate_tables(tables: list[str], options: list[str]) -> CommandOutput:
    """Runs `calibrate TABLE [TABLE ...] [--predict TABLE] [--leave-out KIND]`."""
    config, out, max_seconds = parse_changes(
        ServerTablesConfig(tables=tuple(tables)),
        options,
        "jaxkv calibrate TABLE [TABLE ...]",
        "TABLE is a CSV of measured servers, as AIConfigurator or ML.ENERGY has it.",
    )
    experiment = Experiment("server_tables", TABLES_QUESTION, (SERVER_TABLES,))
    return run_study(experiment, config, out, max_seconds).lift_metrics()
