"""Viewer of runs: traces in files, pages that replay them, pictures of steps."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.report.viewer.page import MAX_PAGE_STEPS, render_viewer
    from jaxkv.report.viewer.perfetto import make_perfetto_trace
    from jaxkv.report.viewer.run_events import RunEvent, list_events
    from jaxkv.report.viewer.run_trace import RunTrace, TraceRequest
    from jaxkv.report.viewer.simulated_run import record_simulation
    from jaxkv.report.viewer.step_picture import draw_run, draw_step

__all__, __getattr__, __dir__ = lazy_exports(__name__)
