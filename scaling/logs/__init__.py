"""Logs of runs: columns, files, selection rules."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.logs.columns import (
        FLOPS_PER_PARAM_AND_TOKEN,
        LETTERS,
        SIZE_COLUMNS,
        LogColumns,
    )
    from scaling.logs.curves import (
        MIN_LOSSES,
        CurveColumns,
        CurveLog,
        TrainingCurve,
        read_curves,
    )
    from scaling.logs.doubts import find_doubts
    from scaling.logs.files import CURVES, RUNS, read_log_text
    from scaling.logs.log import Log, read_log
    from scaling.logs.rules import mentions, parse_rule
    from scaling.logs.run_sizes import RunSize, parse_run_size
    from scaling.logs.task_runs import (
        LADDER_TASKS,
        DownstreamTask,
        TaskRuns,
        parse_task,
        read_task_runs,
    )
    from scaling.logs.tuned_runs import TunedCell, TunedColumns, read_tuned_runs

__all__, __getattr__, __dir__ = lazy_exports(__name__)
