"""Results of commands: tables, texts, claims, plain JSON, and the folder of a run."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.report.claims import (
        CLAIM_KINDS,
        NOT_JUDGED,
        Claim,
        ClaimKind,
        Direction,
        Relation,
        Verdict,
        claim_numbers,
        count_verdicts,
        group_heads,
        name_verdict,
    )
    from jaxkv.report.environment import describe_machine, num_cpus
    from jaxkv.report.parts import (
        Excerpts,
        ReportPart,
        Sheet,
        Verdicts,
        metric_sheets,
        numbered_list,
        paragraph,
        part_to_markdown,
        render_report,
        row_sheet,
    )
    from jaxkv.report.plain_json import (
        config_dumps,
        config_loads,
        dumps,
        from_plain,
        to_plain,
    )
    from jaxkv.report.run_folder import (
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
        replace_run,
        write_files,
    )
    from jaxkv.report.study import SMOKE, Experiment, Study
    from jaxkv.report.tables import (
        Bools,
        Floats,
        Ints,
        ResultRecord,
        ResultTable,
        Row,
        Texts,
        column,
        computed_column,
        field_values,
        metrics,
        sheets,
        to_rows,
    )
    from jaxkv.report.units import (
        format_bytes,
        format_count,
        format_flops,
        format_named,
        format_number,
        format_percent,
        format_rate,
        format_seconds,
    )
    from jaxkv.report.viewer.page import render_viewer
    from jaxkv.report.viewer.perfetto import make_perfetto_trace
    from jaxkv.report.viewer.run_trace import RunTrace
    from jaxkv.report.viewer.simulated_run import record_simulation
    from jaxkv.report.viewer.step_picture import draw_run, draw_step

__all__, __getattr__, __dir__ = lazy_exports(__name__)
