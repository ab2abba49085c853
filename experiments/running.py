"""Carries out one run: folder, progress, result, and what the command line says."""

import time
from pathlib import Path
from typing import Any, NamedTuple

from experiments import documents, reporting
from experiments.catalogue import Experiment


class Answer(NamedTuple):
    """What a command has to say.

    Attributes:
      document: the JSON document.
      sheets: tables of `reporting.Sheet` for a person.
      lines: what else a person should read, below the tables.
      status: the exit status.
    """

    document: dict[str, Any]
    sheets: list[Any]
    lines: list[str]
    status: int = 0


def run(experiment: Experiment, config: Any, out: Path | None) -> Answer:
    """Runs an experiment into a run folder.

    Ctrl-C asks the run to end early; what it had by then is kept like a whole result.

    Args:
      experiment: what to run.
      config: the config to run it with.
      out: the folder for the results, as `store.new_folder` takes it.

    Returns:
      The folder, claims and metrics, with status 130 if it was ended early.

    Raises:
      KeyboardInterrupt: a second Ctrl-C; the folder holds the config only.
      ValueError: the folder or something the config names cannot be used.
    """
    from experiments import store, terminal

    folder = store.new_folder(out, experiment.name)
    store.begin(folder, experiment, config)
    started = time.monotonic()
    try:
        with terminal.Terminal() as bars:
            result = experiment.run(config, bars)
    except KeyboardInterrupt:
        line = f"interrupted at once; only the config is in {folder}"
        raise KeyboardInterrupt(line) from None
    kept = store.finish(
        folder,
        experiment,
        result,
        duration_s=time.monotonic() - started,
        interrupted=bars.stopped,
    )
    document = {
        "out": folder,
        "interrupted": bars.stopped,
        "claims": kept.claims,
        "metrics": kept.metrics,
    }
    sheets = reporting.metric_sheets(documents.plain(kept.metrics))
    sheets += [reporting.claim_sheet(kept.claims)] if kept.claims else []
    lines = ["interrupted; this is what it had"] if bars.stopped else []
    lines.append(f"report: {folder / 'report.md'}")
    return Answer(document, sheets, lines, 130 if bars.stopped else 0)
