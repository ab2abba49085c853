"""What does a GPU say of all this, in calls of a few minutes?

In every call the most valuable that is not recorded yet is done, part by part: whether
the kernels are right, how fast they are, what a step launches, how fast the engine
decodes, how fast we train, and a sweep. Each part has a share of the time that is left;
each piece of it runs in a process of its own and is on the disk when it is done, so a
kernel that crashes, or a machine that is taken away, costs a piece.
"""

import collections
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any, Literal

from experiments.bench.device import parts
from experiments.bench.device.parts import Part, Piece
from experiments.framework import Part as ReportPart
from experiments.framework import Sheet, run_folder
from experiments.plotting import style, systems
from jaxkv import files, validation
from jaxkv.progress import QUIET, Progress

FILE = "pieces.jsonl"
"""In the folder: what is recorded, a piece a line."""
MAX_TRIES = 2
"""Times that a piece is tried that gives nothing."""
LEAST_S = 5.0
"""Seconds under which nothing is begun."""
SPARE_S = 3.0
"""Seconds at the end, in which what there is is written."""
MOST_SHARE = 0.6
"""Of a call's time, that a piece must have had before its end counts as a failure."""
GRACE_S = 60.0
"""Seconds beyond its share after which a part's process is killed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What is asked."""

    size: Literal["gpu", "tiny"] = "gpu"
    """Whether of a GPU, or a trial of it all in a minute or two on anything."""
    only: tuple[str, ...] = ()
    """Parts that are asked alone; none means all."""
    max_s: float = 540.0
    """Seconds of a call without `--max-seconds`."""
    folder: str = run_folder.OUT
    """Where pieces are kept; the run's own folder, unless another is named."""

    def __post_init__(self) -> None:
        """Refuses parts that there are not."""
        validation.above(self, "max_s")
        for name in self.only:
            validation.choice("only", name, NAMES)


NAMES = ("correctness", "kernels", "timeline", "decode", "train", "isoflop")
CONFIGS = {"gpu": Config(), "smoke": Config(size="tiny", only=NAMES[:1])}


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Does what is not recorded yet; ended early, it has the pieces that are done.

    Returns:
      A row for each piece: `part`, `name`, `seconds`, `tries`, `found` and `note`.
    """
    left_s = getattr(progress, "left_s", math.inf)
    end_s = parts.now_s() + min(config.max_s, left_s) - SPARE_S
    with files.kept(config.folder) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        call = _Call(Kept(folder / FILE), end_s, progress)
        asked = [
            part
            for part in parts.of(config.size)
            if not config.only or part.name in config.only
        ]
        update = progress.bar("pieces", sum(len(x.names) for x in asked), "pieces")
        while not progress.stopped and (open_ := [x for x in asked if call.lacks(x)]):
            has_begun = False
            for place, part in enumerate(open_):
                has_begun |= call.spend(part, open_[place:])
                update(sum(len(x.names) - len(call.lacks(x)) for x in asked))
            if not has_begun:
                # Somebody must see that the time is up: then the command goes on.
                while math.isfinite(left_s) and not progress.stopped:
                    time.sleep(0.1)
                break
        return call.kept.rows


class Kept:
    """The pieces that are recorded, each on the disk before it is counted."""

    def __init__(self, path: Path):
        self.path = path
        lines = files.read_text(path).splitlines() if path.exists() else []
        self.rows = [files.parse_object(line, path) for line in lines]

    def lacks(self, part: Part) -> list[str]:
        """Names of pieces that are to be tried, those that failed last."""
        tries = {x["name"]: x for x in self.rows if x["part"] == part.name}
        new = [x for x in part.names if x not in tries]
        again = [
            name
            for name in part.names
            if name in tries
            and tries[name]["found"] is None
            and tries[name]["tries"] < MAX_TRIES
        ]
        return new + again

    def add(self, part: str, piece: Piece, seconds: float) -> None:
        """Records a piece, in place of an earlier try."""
        same = [x for x in self.rows if (x["part"], x["name"]) == (part, piece.name)]
        tries = (same[0]["tries"] if same else 0) + (not piece.goes_on)
        row = {"part": part, "name": piece.name, "seconds": seconds, "tries": tries}
        row |= {"found": piece.found, "note": piece.note}
        self.rows = [x for x in self.rows if x not in same] + [row]
        text = "".join(json.dumps(x) + "\n" for x in self.rows)
        files.write_aside(self.path, text)


class _Call:
    """One call: until when, and what has been tried in it.

    Args:
      kept: what is recorded.
      end_s: of the call, by `parts.now_s`.
      progress: is told what is done.
    """

    def __init__(self, kept: Kept, end_s: float, progress: Progress):
        self.kept, self.end_s, self.progress = kept, end_s, progress
        self._total_s = end_s - parts.now_s()
        self._tried: set[tuple[str, str]] = set()

    def lacks(self, part: Part) -> list[str]:
        """Pieces to be tried in this call: none twice."""
        lacking = self.kept.lacks(part)
        return [x for x in lacking if (part.name, x) not in self._tried]

    def spend(self, part: Part, behind: list[Part]) -> bool:
        """Answers pieces until the part's share of what is left is over.

        Args:
          part: whose.
          behind: the parts that still have pieces, it and those behind it.

        Returns:
          Whether anything was begun: a part needs some time.
        """
        left_s = self.end_s - parts.now_s()
        share_s = left_s * part.share / sum(x.share for x in behind)
        soft_end_s = parts.now_s() + max(share_s, part.least_s)
        has_begun = False
        while (names := self.lacks(part)) and not self.progress.stopped:
            now_s = parts.now_s()
            is_over = soft_end_s - now_s < LEAST_S
            if self.end_s - now_s < part.least_s or is_over:
                break
            has_begun = True
            chosen = names[: part.at_once]
            self.progress.show(f"{part.name}: {chosen[0]}")
            if not self._answer(part, chosen, soft_end_s - now_s, now_s):
                break
        return has_begun

    def _answer(
        self, part: Part, names: list[str], soft_s: float, now_s: float
    ) -> bool:
        """Has some pieces answered and records them; whether to ask for more."""
        left_s = self.end_s - now_s
        soft_s = min(soft_s, left_s)
        kill_s = min(left_s, soft_s + GRACE_S)
        pieces = part.answer(names, self.kept.path.parent, soft_s, kill_s)
        seconds = parts.now_s() - now_s
        for piece in pieces:
            was_killed = piece.found is None and piece.note.startswith(parts.KILLED)
            if was_killed and kill_s == left_s < MOST_SHARE * self._total_s:
                piece = piece._replace(goes_on=True)  # the call's end came too soon
            self.kept.add(part.name, piece, seconds / len(pieces))
            if piece.found is None:
                self._tried.add((part.name, piece.name))
        return bool(pieces) and not pieces[-1].goes_on


def metrics(result: list[dict[str, Any]]) -> dict[str, Any]:
    """The pieces, for JSON, and what is wrong, by name."""
    return {"pieces": result, "wrong": wrong(result), "failed": failed(result)}


def wrong(result: list[dict[str, Any]]) -> list[str]:
    """Kernels whose answer is wrong: the piece and the implementation."""
    return [
        f"{row['name']}: {each['implementation']}, error={each['error']:.2g}"
        for row in result
        if row["part"] == "correctness" and row["found"]
        for each in row["found"]["implementations"]
        if not each.get("right", True)
    ]


def failed(result: list[dict[str, Any]]) -> list[str]:
    """Pieces that gave nothing, and why."""
    return [
        f"{row['part']} {row['name']}: {row['note']}"
        for row in result
        if row["found"] is None
    ]


def summary(result: list[dict[str, Any]]) -> list[ReportPart]:
    """Tells how much of each part there is, and what went wrong."""
    done = collections.Counter(x["part"] for x in result if x["found"] is not None)
    spent: dict[str, float] = collections.defaultdict(float)
    for row in result:
        spent[row["part"]] += row["seconds"]
    lines = [[x, str(done[x]), f"{spent[x]:.0f}"] for x in NAMES]
    found: list[ReportPart] = [Sheet("pieces", ["part", "done", "seconds"], lines)]
    for title, said in (("wrong", wrong(result)), ("failed", failed(result))):
        if said:
            found.append(Sheet(title, ["what"], [[x] for x in said]))
    return found


def plot(ax: Any, result: list[dict[str, Any]]) -> None:
    """Draws how much of each part there is."""
    done = [
        sum(x["part"] == name and x["found"] is not None for x in result)
        for name in NAMES
    ]
    bars = ax.barh(NAMES, done, color=style.colors()[systems.BLUE])
    ax.bar_label(bars, [str(x) for x in done], padding=3)
    ax.invert_yaxis()
    title = f"{sum(done)} of {len(result)} pieces recorded"
    style.titled(ax, title, "recorded [pieces]", "")
