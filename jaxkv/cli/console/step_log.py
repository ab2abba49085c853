"""Numbers of training steps for JSON lines, TensorBoard or Weights & Biases."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import ModuleType

type StepLog = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its numbers by name."""

STEPS_FILE = "steps.jsonl"
"""File of `--log jsonl`: a line for each step, with `step` and the numbers."""
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Package of each destination that needs one."""


@contextlib.contextmanager
def open_step_log(kind: str | None, folder: Path) -> Generator[StepLog]:
    """Opens the destination of `--log` at the first step, and closes it at the end.

    Args:
      kind: "jsonl", "tensorboard" or "wandb"; None discards all numbers.
      folder: folder of the run, which contains the files.

    Raises:
      ValueError: the kind is unknown, or its package is not installed.
    """
    if kind is None:
        yield lambda step, numbers: None
        return
    package = _PACKAGES.get(kind)
    if package is None and kind != "jsonl":
        raise ValueError(f"--log {kind}: must be jsonl, tensorboard or wandb")
    try:
        module = importlib.import_module(package or "json")
    except ImportError:
        line = f"--log {kind}: {package} is missing: pip install {package}"
        raise ValueError(line) from None
    with contextlib.ExitStack() as closing:

        @functools.cache  # the folder exists at the first step, not before
        def destination() -> StepLog:
            log, close = _OPENERS[kind](module, folder)
            closing.callback(close)
            return log

        yield lambda step, numbers: destination()(step, numbers)


def _open_jsonl(json: ModuleType, folder: Path) -> tuple[StepLog, Callable[[], None]]:
    file = (folder / STEPS_FILE).open("a", encoding="utf-8")

    def log(step: int, numbers: Mapping[str, float]) -> None:
        file.write(json.dumps({"step": step, **numbers}) + "\n")
        file.flush()  # a killed run loses no line

    return log, file.close


def _open_tensorboard(
    tensorboard: ModuleType, folder: Path
) -> tuple[StepLog, Callable[[], None]]:
    writer = tensorboard.SummaryWriter(str(folder / "tensorboard"))

    def log(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _open_wandb(wandb: ModuleType, folder: Path) -> tuple[StepLog, Callable[[], None]]:
    run = wandb.init(project="jaxkv", name=folder.name, dir=str(folder))
    return lambda step, numbers: run.log({**numbers}, step=step), run.finish


_OPENERS = {
    "jsonl": _open_jsonl,
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
}
