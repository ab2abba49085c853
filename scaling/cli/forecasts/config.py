"""Options of `jaxkv fit LOG --law downstream` and `--law hyperparameters`."""

from typing import Annotated, Literal

from jaxkv.validation import ConfigRecord, Range
from scaling.logs import (
    LADDER_TASKS,
    DownstreamTask,
    RunSize,
    parse_run_size,
    parse_task,
)

DOWNSTREAM = "downstream"
"""Value of `--law` that fits tasks."""
HYPERPARAMETERS = "hyperparameters"
"""Value of `--law` that fits learning rate and batch size."""


class DownstreamConfig(ConfigRecord):
    """Runs with losses and accuracies of tasks, and the runs to predict."""

    log: str
    """Table with a row for each run: parameters and tokens, or a name such as
    190M-0.5xC, and for each task bits per byte and accuracy."""
    law: Literal["downstream"] = "downstream"
    """The two-stage law of tasks."""
    predict: tuple[str, ...] = ()
    """Runs to predict: PARAMETERS:TOKENS such as 7B:4T, or a table with the columns of
    the log, whose metrics are scored and may be missing."""
    hold_out: str = ""
    """Rule for runs to hold out and score, such as 'N > 2e9': N, D, or columns."""
    tasks: tuple[str, ...] = tuple(LADDER_TASKS)
    """Tasks of OLMo's ladder by name, or NAME=LOSS,ACCURACY,CHANCE with two columns."""
    n: str = ""
    """Column of the parameters; found by name or from the run's name if not given."""
    d: str = ""
    """Column of the tokens; found like the parameters."""
    level: Annotated[float, Range(0, 1, "()")] = 0.9
    """Probability of the intervals."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        names = [task.name for task in self.parsed_tasks]
        if not names or len({*names}) < len(names):
            raise ValueError(f"tasks={self.tasks} must name each task once")

    @property
    def parsed_tasks(self) -> tuple[DownstreamTask, ...]:
        """The tasks."""
        return tuple(parse_task(text) for text in self.tasks)


class HyperparameterConfig(ConfigRecord):
    """Runs at several learning rates and batch sizes, and the sizes to predict."""

    log: str
    """Table with a row for each run: parameters, tokens, learning rate, batch, loss; or
    the folder of a sweep."""
    law: Literal["hyperparameters"] = "hyperparameters"
    """The surface of the loss over parameters, tokens, rate and batch."""
    predict: tuple[str, ...] = ()
    """Sizes to predict, each PARAMETERS:TOKENS such as 1B:57B, or a table with the
    columns of the log, whose measured pairs are scored."""
    hold_out: str = ""
    """Rule for cells of N and D to hold out and score, such as 'N > 5e8'."""
    where: str = ""
    """Rule for the rows to read, such as "schedule == 'wsd'"."""
    n: str = ""
    """Column of the parameters, active ones of a mixture of experts; found by name if
    not given, like the columns below."""
    d: str = ""
    """Column of the tokens."""
    lr: str = ""
    """Column of the peak learning rate."""
    batch: str = ""
    """Column of the batch size."""
    loss: str = ""
    """Column of the loss."""
    batch_tokens: Annotated[float, Range(1, ends="[)")] = 2048.0
    """Tokens of a batch of 1, for the published law: the length of a sequence, or 1."""
    level: Annotated[float, Range(0, 1, "()")] = 0.9
    """Probability of the intervals."""


def split_targets(predict: tuple[str, ...]) -> tuple[list[RunSize], list[str]]:
    """Returns the sizes of `--predict`, and the paths of its tables."""
    sizes = []
    tables = []
    for text in predict:
        if ":" in text:
            sizes.append(parse_run_size(text))
        else:
            tables.append(text)
    return sizes, tables
