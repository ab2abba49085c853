"""Structure of an experiment: registry, runs, run folders, claims, tables, reports."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from experiments.framework.claims import (
        NOT_JUDGED,
        Claim,
        Direction,
        MeasuredValue,
        claims_file,
        measured,
    )
    from experiments.framework.config_json import (
        config_dumps,
        config_loads,
        dumps,
        from_plain,
        to_plain,
    )
    from experiments.framework.environment import describe_machine, num_cpus
    from experiments.framework.registry import (
        SMOKE,
        entries,
        find_entry,
        load_experiment,
    )
    from experiments.framework.report import (
        Excerpts,
        ReportPart,
        Sheet,
        claim_numbers,
        count_verdicts,
        group_heads,
        metric_sheets,
        numbered_list,
        paragraph,
        part_to_markdown,
        row_sheet,
    )
    from experiments.framework.run_folder import (
        EARLIER,
        OUT,
        SavedRun,
        abandon_run,
        begin_run,
        discard_earlier,
        finish_run,
        has_result,
        lock_folder,
        mark_status,
        read_run,
        write_files,
    )
    from experiments.framework.study import Experiment, Study
    from experiments.framework.table import (
        Bools,
        Floats,
        Ints,
        ResultRecord,
        ResultTable,
        Texts,
        column,
        computed_column,
        field_values,
        metrics,
        sheets,
        to_rows,
    )
    from experiments.framework.units import (
        format_bytes,
        format_count,
        format_flops,
        format_named,
        format_number,
        format_percent,
        format_rate,
        format_seconds,
    )
    from experiments.framework.user_errors import error_line, is_user_error

__all__, __getattr__, __dir__ = lazy_exports(__name__)
