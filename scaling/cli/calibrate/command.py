"""`jaxkv calibrate RUNS`: fits a server's step times to a table of measured stages."""

from jaxkv import files
from jaxkv.cli import CommandOutput, is_word, parse_changes, run_study
from jaxkv.report import Experiment
from scaling.cli.calibrate.study import QUESTION, STUDY, CalibrationConfig


def main(args: list[str]) -> CommandOutput:
    """Runs `calibrate RUNS [OPTIONS]`; `--out FILE.json` keeps only the coefficients.

    Raises:
      ValueError: RUNS is missing, or an option is invalid.
    """
    if not is_word(args) and not {"-h", "--help"} & {*args}:
        raise ValueError("RUNS is missing: a CSV of measured load stages")
    runs = args[0] if is_word(args) else ""
    config, out, max_seconds = parse_changes(
        CalibrationConfig(runs=runs),
        args[1:] if runs else args,
        "jaxkv calibrate RUNS",
        "RUNS is a CSV of load stages of servers, as their clients measured them.",
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
