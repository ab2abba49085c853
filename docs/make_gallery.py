"""Records the runs of `docs/gallery/runs.toml` as traces next to it.

Run `python docs/make_gallery.py` for all runs, or name some. The site makes a page of
each trace when it is built. Compilation takes minutes on a CPU.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

import jaxkv
from jaxkv.report.viewer import RunTrace

GALLERY = Path(__file__).with_name("gallery")
TEMPERATURE = 0.0
"""Temperature of a request that names none."""


def record(run: dict[str, Any], bounds: dict[str, Any]) -> RunTrace:
    """Serves the requests of a run, and returns its trace."""
    engine = jaxkv.Engine.load(
        "stdlib-bytes",
        record_pages=True,
        speculate=run.get("speculate"),
        **bounds | run.get("bounds", {}),
    )
    engine.compile()  # one program for all runs with the same bounds
    for seed, request in enumerate(run["requests"]):
        prompt = request.pop("prompt")
        fields = {"temperature": TEMPERATURE, "seed": seed} | request
        engine.submit(prompt, jaxkv.Sampling(**fields))
    for _ in engine.stream():
        pass
    return RunTrace.of_engine(engine)


def main(names: list[str]) -> None:
    """Records the named runs, or all."""
    runs = tomllib.loads((GALLERY / "runs.toml").read_text(encoding="utf-8"))
    bounds = runs.pop("bounds")
    for name in names or runs:
        trace = record(runs[name], bounds)
        trace.save(GALLERY / f"{name}.npz")
        print(f"{name}: {trace}")


if __name__ == "__main__":
    main(sys.argv[1:])
