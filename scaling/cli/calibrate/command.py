"""`jaxkv calibrate`: fits a server's step times to measured stages or servers."""

import itertools

from jaxkv import files
from jaxkv.cli import CommandOutput, asks_help, parse_changes, run_study
from jaxkv.files import read_table
from jaxkv.report import Experiment
from jaxkv.validation import ConfigRecord
from scaling.calibration import find_server_form
from scaling.cli.calibrate.server_report import SERVER_TABLES, TABLES_QUESTION
from scaling.cli.calibrate.server_tables import ServerTablesConfig
from scaling.cli.calibrate.study import QUESTION, STUDY, CalibrationConfig


def main(args: list[str]) -> CommandOutput:
    """Runs `calibrate RUNS [OPTIONS]` or `calibrate TABLE [TABLE ...] [OPTIONS]`.

    RUNS is a table of load stages; tables of servers have the form of AIConfigurator or
    ML.ENERGY and are fitted together, see `server_tables`. `--out FILE.json` keeps only
    the fit.

    Raises:
      ValueError: RUNS is missing, or an option is invalid.
    """
    names = list(itertools.takewhile(lambda x: not x.startswith("-"), args))
    if not names and not asks_help(args):
        raise ValueError("RUNS is missing: a CSV of measured load stages")
    is_table = bool(names) and bool(
        find_server_form(read_table(names[0], allow_partial=False).names)
    )
    names = names if is_table else names[:1]
    if is_table:
        experiment = Experiment("server_tables", TABLES_QUESTION, (SERVER_TABLES,))
        base: ConfigRecord = ServerTablesConfig(tables=tuple(names))
        subject = "TABLE [TABLE ...]"
        description = (
            "TABLE is a CSV of measured servers, as AIConfigurator or ML.ENERGY has it."
        )
    else:
        experiment = Experiment("calibration", QUESTION, (STUDY,))
        base = CalibrationConfig(runs=names[0] if names else "")
        subject = "RUNS"
        description = (
            "RUNS is a CSV of load stages of servers, as their clients measured them. "
            "Tables of AIConfigurator or ML.ENERGY have their own options: TABLE "
            "--help."
        )
    config, out, max_seconds = parse_changes(
        base,
        args[len(names) :],
        f"jaxkv calibrate {subject}",
        description,
        "a new one under runs/; FILE.json writes only the fit there",
    )
    file = out if out is not None and out.suffix == ".json" else None
    leave_out = config.leave_out
    if file is not None and "none" not in leave_out:
        raise ValueError(f"--out {file}: {leave_out=} writes no coefficients")
    answer = run_study(experiment, config, None if file else out, max_seconds)
    server = answer.document["out"] / "server.json"
    if file is not None and server.is_file():
        files.write_atomically(file, files.read_text(server))
        answer.lines.append(f"coefficients: {file}")
    return answer.lift_metrics()
