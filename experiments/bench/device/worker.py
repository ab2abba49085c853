"""Measures pieces of a part of `bench device`, in a process run by `peer_main`."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

from experiments import lab
from experiments.bench.decode import timeline
from experiments.bench.kernels import checks
from jaxkv.cli import run_study

MEASURES = {"correctness": checks.check_kernel, "timeline": timeline.profile_decode}
"""Parts whose pieces are function calls; pieces of other parts are runs of
experiments."""
KILLED = "killed: time limit reached"


class PieceWorker:
    """A part, with its folder; an exception ends the process."""

    version = ""

    def __init__(self, part: str, size: str, folder: str, num_threads: str):
        self.part = part
        self.size = size
        self.folder = folder

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Measures pieces by name.

        Shapes of kernels share a run, which measures the ceilings once. A run of
        `decode` or `train` that is cut short has no result; `isoflop` is resumed.
        """
        part = self.part
        folder = self.folder
        names = tuple(question["names"])
        if measure := MEASURES.get(part):
            pieces = [{"name": x, "found": measure(self.size, x)} for x in names]
            return {"pieces": pieces}
        is_real = self.size == "gpu"
        max_s = question["limits_s"][0]
        changes = dict[str, Any]()
        if part == "kernels":
            shapes = "real" if is_real else "tiny"
            changes = {"these": names, "max_s": max(1.0, max_s), "shapes": shapes}
        elif part == "isoflop":
            changes = {"folder": f"{folder}/isoflop", "keep_models": False}
        else:
            field, _, number = names[0].partition("-")
            max_s = question["limits_s"][1]
            changes[field] = (int(number),)
            # On a GPU machine, peers use the same Python if torch is installed.
            if part == "train" and is_real and importlib.util.find_spec("torch"):
                changes["peer_python"] = Path(sys.executable)
        experiment = lab.load_experiment(part if part == "isoflop" else f"bench_{part}")
        real = "gpu" if "gpu" in experiment.configs else "real"
        config = experiment.configs[real if is_real else "smoke"]
        config = dataclasses.replace(config, **changes)
        out = Path(folder, "isoflop-run" if part == "isoflop" else ".run")
        done = run_study(experiment, config, out, max_s)
        is_cut = done.status != 0
        numbers = lab.to_plain(done.document["metrics"])
        if part == "isoflop":
            numbers = None if is_cut else numbers
            return {"pieces": [{"name": names[0], "found": numbers, "goes_on": is_cut}]}
        if part != "kernels":
            piece = {"found": numbers} if numbers["rows"] else {"note": KILLED}
            return {"pieces": [{"name": names[0], **piece}]}
        head = {x: numbers[x] for x in ("device", "ceilings", "peers")}
        pieces = []
        for name in names:
            rows = [x for x in numbers["rows"] if x["spec"] == name]
            absent = [x for x in numbers["absent"] if x["spec"] == name]
            skipped = any(x["note"].startswith("skipped: the") for x in absent)
            if rows and not (skipped and is_cut):
                shape = head | {"rows": rows, "absent": absent}
                pieces.append({"name": name, "found": shape})
        return {"pieces": pieces}
