"""Records the runs of `docs/gallery/runs.toml` as traces next to it.

Run `python docs/make_gallery.py` for all runs, or name some. The site makes a page of
each trace when it is built. Compilation takes minutes on a CPU.
"""

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax

import jaxkv
from jaxkv import models, scheduling
from jaxkv.files import BUNDLED, model_folder
from jaxkv.report.viewer import RunTrace
from jaxkv.speculation import SpeculationConfig

GALLERY = Path(__file__).with_name("gallery")
TEMPERATURE = 0.0
"""Temperature of a request that names none."""


def load_model(run: dict[str, Any]) -> models.LoadedModel:
    """Returns the model of a run.

    With `window`, every other layer sees that many tokens. With `recurrence`, it is
    recurrent, and all weights are random, since no bundled model has such layers.
    """
    loaded = models.load_model(model_folder(run.get("model", "stdlib-bytes")))
    fields: dict[str, Any] = {"attention_pattern": (0, 1)}
    if "window" in run:
        fields["other_attention"] = (models.AttentionKind(window=run["window"]),)
    elif "recurrence" in run:
        fields["other_attention"] = (models.AttentionKind(is_recurrent=True),)
        fields["recurrence"] = models.RecurrenceConfig(**run["recurrence"])
    else:
        return loaded
    config = dataclasses.replace(loaded.config, **fields)
    loaded = loaded._replace(config=config)
    if "recurrence" in run:
        params = models.init_params(config, jax.random.key(0))
        loaded = loaded._replace(params=params)
    return loaded


def record(run: dict[str, Any], bounds: dict[str, Any]) -> RunTrace:
    """Serves the requests of a run, and returns its trace."""
    speculate = run.get("speculate")
    if speculate is not None and "heads_folder" in speculate:
        speculate["heads_folder"] = BUNDLED / speculate["heads_folder"]
    engine = jaxkv.Engine.load(
        model_folder(run.get("model", "stdlib-bytes")),
        loaded=load_model(run),
        record_pages=True,
        speculate=None if speculate is None else SpeculationConfig(**speculate),
        policy=scheduling.fcfs(**run.get("policy", {})),
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
        path = GALLERY / f"{name}.npz"
        if "simulate" in runs[name]:
            words = ["jaxkv", "simulate", *runs[name]["simulate"].split()]
            subprocess.run([*words, "--record", str(path)], check=True)
        else:
            record(runs[name], bounds).save(path)
        print(f"{name}: {RunTrace.read(path)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
