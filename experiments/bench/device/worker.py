"""Answers pieces of one part in a process of its own, so that a crash loses one piece.

    python -m experiments.bench.device.worker PART SIZE FILE SECONDS NAME...

appends a line of JSON to FILE when it begins a piece, `{"begins": name}`, and another
when it has its answer, `{"name", "found"}`, or says why there is none, `{"name",
"note"}`. It begins no piece when the seconds are over.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.bench.device import checks, timeline

PARTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "correctness": checks.check,
    "timeline": timeline.measure,
}


def main(part: str, size: str, file: str, seconds: str, *names: str) -> None:
    """Answers pieces by name, one after another."""
    end_s = time.monotonic() + float(seconds)
    for name in names:
        if time.monotonic() > end_s:
            return
        append(Path(file), {"begins": name})
        try:
            said = {"found": PARTS[part](size, name)}
        except Exception as error:  # whatever a compiler or a device raises is told
            lines = str(error).strip().split("\n")
            said = {"note": f"{type(error).__name__}: {lines[0][:300]}"}
        append(Path(file), {"name": name, **said})


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds a line, which is on the disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
