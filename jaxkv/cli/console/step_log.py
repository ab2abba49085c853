"""Numbers of training steps for JSON lines, TensorBoard or Weights & Biases."""

import contextlib
import functools
import importlib
import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

type StepLog = Callable[[int, Mapping[str, int | float]], None]
"""Takes a step and its numbers by name."""

STEPS_FILE = "steps.jsonl"
"""File of `--log jsonl`: a line for each step, with `step` and the numbers."""
_PACKAGES = {"jsonl": "json", "tensorboard": "tensorboardX", "wandb": "wandb"}


@contextlib.contextmanager
def open_step_log(kind: str | None, folder: Path) -> Generator[StepLog]:
    """Opens the destination of `--log` at the first step, and closes it at the end.

    Args:
      kind: "jsonl", "tensorboard" or "wandb"; None discards all numbers.
      folder: folder of the run, which contains the files.

    Raises:
      ValueError: the kind is unknown, or its package is not installed.
    """
    package = _PACKAGES.get(kind or "jsonl")
    if package is None:
        raise ValueError(f"--log {kind}: must be jsonl, tensorboard or wandb")
    try:
        module = importlib.import_module(package)
    except ImportError:
        line = f"--log {kind}: {package} is missing: pip install {package}"
        raise ValueError(line) from None
    with contextlib.ExitStack() as closing:

        @functools.cache  # the folder exists at the first step, not before
        def destination() -> StepLog:
            if kind == "wandb":
                run = module.init(project="jaxkv", name=folder.name, dir=str(folder))
                closing.callback(run.finish)
                return lambda step, numbers: run.log({**numbers}, step=step)
            if kind == "tensorboard":
                writer = module.SummaryWriter(str(folder / "tensorboard"))
                closing.callback(writer.close)

                def add(step: int, numbers: Mapping[str, int | float]) -> None:
                    for name, value in numbers.items():
                        writer.add_scalar(name, value, step)

                return add
            path = folder / STEPS_FILE
            file = closing.enter_context(path.open("a", encoding="utf-8", buffering=1))
            return lambda step, numbers: print(
                json.dumps({"step": step, **numbers}), file=file
            )

        if kind is None:
            yield lambda step, numbers: None
        else:
            yield lambda step, numbers: destination()(step, numbers)
