"""Are the kernels correct on a GPU, and how fast is each part, in calls of minutes?

Each call measures the most valuable pieces that are not recorded yet, part by part:
correctness of the kernels, their speed, launches per step, decode rates, training
rates, and a sweep. Each part has a share of the remaining time. A crash, or the loss of
the machine, costs one piece.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from experiments import lab
from experiments.bench.decode import timeline
from experiments.bench.device import worker
from experiments.bench.kernels import checks
from experiments.harness import PeerProcess
from jaxkv import files
from pallas_kernels.bench import SETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS_FILE = "pieces.jsonl"
"""File in the folder with the recorded pieces, one per line."""
MAX_TRIES = 2
"""Largest number of attempts for a piece without a result."""
LEAST_S = 5.0
SPARE_S = 3.0
GRACE_S = 60.0
"""Smallest time for a piece, time reserved for the report, and time beyond its share
after which a part's process is killed; in s."""
MOST_SHARE = 0.6
"""Share of a call's time that a piece must have had to count as failed when the call
ends."""

now_s = time.monotonic
"""Clock; tests replace it."""

BENCH_PARTS = {
    "correctness": (0.25, 20.0, 99),
    "kernels": (0.3, 60.0, 8),
    "timeline": (0.15, 60.0, 2),
    "decode": (0.3, 120.0, 1),
    "train": (0.15, 60.0, 1),
    "isoflop": (0.5, 60.0, 1),
}
"""By part: its share of the remaining time, relative to later parts; the smallest time
for which it is started on a GPU, in s; the largest number of pieces per process."""


class Config(lab.ConfigRecord):
    """Parts to measure, and the time of a call."""

    size: Literal["gpu", "tiny"] = "gpu"
    """`gpu` measures a GPU; `tiny` tests all parts in a minute or two on any device."""
    only: Annotated[tuple[str, ...], lab.Choices(BENCH_PARTS)] = ()
    """Parts to measure; empty for all parts."""
    max_s: lab.PositiveFloat = 540.0
    """Time of a call without `--max-seconds`, in s."""
    folder: str = lab.OUT
    """Folder of the pieces; by default the run's own folder."""


CONFIGS = {"gpu": Config(), "smoke": Config(size="tiny", only=("correctness",))}


def pieces_by_part(size: str) -> dict[str, Sequence[str]]:
    """Returns the names of the pieces by part, the most informative first."""
    is_real = size == "gpu"
    quick = SETS["quick"]
    shapes = SETS["real" if is_real else "tiny"]
    return {
        "correctness": checks.check_names(size),
        "kernels": [x.name for x in sorted(shapes, key=lambda x: x not in quick)],
        "timeline": timeline.MODEL_NAMES,
        "decode": [f"batch-{x}" for x in ((1, 32, 128) if is_real else (1,))],
        "train": [f"width-{x}" for x in ((128, 256, 512, 1024) if is_real else (8,))],
        "isoflop": ["isoflop"],
    }


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[lab.Row]:
    """Measures the missing pieces; a stopped run has the completed pieces.

    Returns:
      A row for each piece: `part`, `name`, `seconds`, `tries`, `found` and `note`.
    """
    is_limited = math.isfinite(limit_s := getattr(progress, "left_s", math.inf))
    total_s = min(config.max_s, limit_s) - SPARE_S
    end_s = now_s() + total_s
    size = config.size
    names_of = pieces_by_part(config.size)
    parts = [part for part in names_of if part in (config.only or BENCH_PARTS)]
    tried: set[tuple[str, str]] = set()
    with files.folder_or_temporary(config.folder) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / PARTS_FILE
        lines = files.read_text(path).splitlines() if path.exists() else []
        records = [files.parse_object(line, path) for line in lines]
        rows = {(x["part"], x["name"]): x for x in records}

        def lacking(part: str) -> list[str]:
            """Pieces to try in this call: new ones, then those that failed before."""
            keys = [(part, name) for name in names_of[part]]
            new = [name for _, name in keys if (part, name) not in rows]
            old = [rows[key] for key in keys if key in rows and key not in tried]
            again = [x for x in old if x["found"] is None and x["tries"] < MAX_TRIES]
            return new + [x["name"] for x in again]

        update = progress.bar("pieces", sum(len(names_of[x]) for x in parts), "pieces")
        while not progress.stopped and (open_ := [x for x in parts if lacking(x)]):
            has_begun = False
            for place, part in enumerate(open_):
                share, least_s, at_once = BENCH_PARTS[part]
                least_s = least_s if size == "gpu" else LEAST_S
                share /= sum(BENCH_PARTS[x][0] for x in open_[place:])
                part_end_s = now_s() + max((end_s - now_s()) * share, least_s)
                while (names := lacking(part)[:at_once]) and not progress.stopped:
                    left_s = end_s - now_s()
                    soft_s = min(left_s, part_end_s - now_s())
                    if left_s < least_s or soft_s < LEAST_S:
                        break
                    has_begun = goes_on = True
                    kill_s = min(left_s, soft_s + GRACE_S)
                    progress.show(f"{part}: {names[0]}")
                    for piece in answer_pieces(
                        (part, size, folder), names, (soft_s, kill_s)
                    ):
                        key = part, piece["name"]
                        # A piece cut short by the end of the call has not failed.
                        is_cut = kill_s == left_s < MOST_SHARE * total_s
                        is_cut &= piece.get("note") == worker.KILLED
                        goes_on = piece.pop("goes_on", False) or is_cut
                        tries = rows.pop(key, {"tries": 0})["tries"] + (not goes_on)
                        row = {"part": part, "name": key[1], "seconds": 0.0}
                        row |= {"tries": tries, "found": None, "note": ""}
                        rows[key] = row | piece
                        text = "".join(json.dumps(x) + "\n" for x in rows.values())
                        files.write_atomically(path, text)
                        tried.add(key)
                    if goes_on:
                        break
                update(sum(len(names_of[x]) - len(lacking(x)) for x in parts))
            if not has_begun:
                # Wait for the time limit, so that the exit status is "resumable".
                while is_limited and not progress.stopped:
                    time.sleep(0.1)
                break
        return [*rows.values()]


def answer_pieces(
    words: tuple[str, str, Path], names: Sequence[str], limits_s: tuple[float, float]
) -> Iterator[lab.Row]:
    """Measures pieces in a `worker` process.

    No piece is started after the first limit, and the process is killed after the
    second.

    Yields:
      `name`, `seconds`, and `found`, or `note` after a failure.
    """
    start_s = now_s()
    soft_end_s, kill_end_s = (start_s + x for x in limits_s)
    peer = (words[0], Path(sys.executable), worker.__file__, "PieceWorker", *words)
    groups = [[x] for x in names] if words[0] in worker.MEASURES else [names]
    group = groups[0]
    try:
        path = os.pathsep.join(sys.path)
        with PeerProcess(*peer, limit_s=limits_s[1], PYTHONPATH=path) as process:
            for group in groups:
                soft_s = soft_end_s - now_s()
                kill_s = kill_end_s - now_s()
                if soft_s < 0:
                    return
                question = {"names": group, "limits_s": (soft_s, kill_s)}
                pieces = process.ask(question, kill_s)["pieces"]
                seconds = (now_s() - start_s) / max(1, len(pieces))
                yield from ({"seconds": seconds, **x} for x in pieces)
                start_s = now_s()
    except ValueError as error:
        note = worker.KILLED if now_s() > kill_end_s else str(error)
        goes_on = words[0] == "isoflop" and now_s() > soft_end_s
        piece = {"name": group[0], "seconds": now_s() - start_s}
        yield piece | {"note": note, "goes_on": goes_on}


def metrics(result: list[lab.Row]) -> dict[str, Any]:
    """Returns the pieces for JSON, incorrect kernels, and failed pieces."""
    wrong = [
        f"{row['name']}: {check['implementation']}, error={check['error']:.2g}"
        for row in result
        if row["part"] == "correctness" and row["found"]
        for check in row["found"]["implementations"]
        if not check.get("right", True)
    ]
    failed = [x for x in result if x["found"] is None]
    lines = [f"{x['part']} {x['name']}: {x['note']}" for x in failed]
    return {"pieces": result, "wrong": wrong, "failed": lines}


def summary(result: list[lab.Row]) -> list[lab.ReportPart]:
    """Tabulates pieces and seconds of each part, errors and failures."""
    lines = []
    for name in BENCH_PARTS:
        selected = [x for x in result if x["part"] == name]
        done = sum(x["found"] is not None for x in selected)
        lines.append([name, str(done), f"{sum(x['seconds'] for x in selected):.0f}"])
    numbers = metrics(result)
    sheets: list[lab.ReportPart] = [
        lab.Sheet("pieces", ["part", "done", "seconds"], lines)
    ]
    for title in ("wrong", "failed"):
        if numbers[title]:
            sheets.append(lab.Sheet(title, ["piece"], [[x] for x in numbers[title]]))
    return sheets


def plot(ax: "Axes", result: list[lab.Row]) -> None:
    """Draws the number of recorded pieces by part."""
    done = [x["part"] for x in result if x["found"] is not None]
    counts = [*map(done.count, BENCH_PARTS)]
    bars = ax.barh([*BENCH_PARTS], counts, color=lab.colors()[lab.BLUE])
    ax.bar_label(bars, padding=3)
    ax.invert_yaxis()
    title = f"{len(done)} of {len(result)} pieces recorded"
    lab.set_labels(ax, title, "recorded [pieces]", "")


STUDY = lab.Study(CONFIGS, list, run, plot, summary=summary, metrics=metrics)
