"""`jaxkv sweep CONFIG`: many runs into a folder, under a table that fills up."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from experiments.cli import parsing
from experiments.cli.console import terminal
from experiments.cli.run import Answer
from experiments.cli.train import configs
from experiments.framework import Sheet, config_json, units
from experiments.harness import sweep_tables
from scaling.sweeps import SweepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `sweep` takes beside its config."""

    out: Annotated[Path | None, parsing.without("runs/sweep-CONFIG")] = None
    """Folder of the runs. If it holds some of them, the others are made."""
    executor: Annotated[
        Literal["local", "ray"] | None, parsing.without("as the config says: local")
    ] = None
    """In this process, or on a Ray cluster."""
    mode: Annotated[
        Literal["auto", "loop", "vmap"] | None, parsing.without("as the config says")
    ] = None
    """Runs of one model one after another or side by side; auto times both."""
    max_seconds: Annotated[float, parsing.without("no end", parsing.MAX_SECONDS)] = (
        math.inf
    )
    keep_models: bool = False
    """Keep the trained models."""
    print_config: bool = False
    """Print the config as JSON, to be changed and passed as CONFIG; run nothing."""


def sweep(name: str, options: Options) -> Answer:
    """Carries out a sweep, or what its folder lacks.

    Args:
      name: a shipped config, or the path of a JSON file.
      options: the rest of the command line.

    Returns:
      The folder and what is in it; status 130 if it was ended early, 143 if by
      SIGTERM, 75 if by the clock.

    Raises:
      ValueError: there is no such config, or `sweeps.sweep` refuses it.
    """
    config = configs.find(name, SweepConfig, configs.SWEEPS)
    changes = {x: getattr(options, x) for x in ("executor", "mode")}
    config = dataclasses.replace(
        config, **{name: value for name, value in changes.items() if value is not None}
    )
    if options.keep_models:
        config = dataclasses.replace(config, keep_models=True)
    if options.print_config:
        text = config_json.config_dumps(config)
        return Answer(json.loads(text), [], [text])
    out = options.out or Path("runs") / f"sweep-{Path(name).stem}"

    def last_words() -> str:
        return f"interrupted at once; the runs that ended are in {out}"

    with terminal.Terminal(last_words, max_seconds=options.max_seconds) as bars:
        outcome = sweep_tables.run(config, out, bars)
    document = {
        "log": outcome.log,
        "completed": outcome.num("done"),
        "diverged": outcome.num("diverged"),
        "failed": outcome.num("failed"),
        "skipped": outcome.skipped,
        "interrupted": outcome.is_stopped,
        "duration_s": outcome.duration_s,
    }
    lines = [f"log: {out}"]
    if outcome.num("done"):
        lines = [f"log: {out}; jaxkv fit {out} fits it"]
    if outcome.is_stopped:
        lines.insert(0, f"{bars.reason}; the same command goes on")
    status = bars.status if outcome.is_stopped else 0
    return Answer(document, _sheets(document, outcome.records), lines, status)


def _sheets(document: dict[str, Any], records: list[dict[str, Any]]) -> list[Sheet]:
    """Counts, and a line for each cell with its best run."""
    counts = [(name, units.cell(value)) for name, value in document.items()]
    rows = []
    cells = {record["cell"]: record for record in records}
    for cell in cells:
        mine = [r for r in records if r["cell"] == cell]
        done = [r for r in mine if r["status"] == "done"]
        best = min(done or mine, key=lambda r: r["loss"] or 0.0)
        rows.append(
            (
                f"{best['hidden_size']}",
                f"{best['num_params']:,}",
                f"{best['num_tokens']:,}",
                f"{best['flops']:.3g}",
                f"{best['learning_rate']:.3g}",
                sweep_tables.cell(mine),
                f"{len(mine)}",
            )
        )
    rows.sort(key=lambda row: (int(row[0]), float(row[3])))
    heads = ("width", "parameters", "tokens", "FLOP", "best rate", "loss", "runs")
    return [Sheet("sweep", ("", ""), counts[1:]), Sheet("cells", heads, rows)]
