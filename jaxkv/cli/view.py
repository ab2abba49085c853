"""Shows recorded runs: `jaxkv view TRACE` writes a page, pictures, a Perfetto file.

The module imports only the standard library at the top, so that `--help` is fast.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jaxkv.cli import parsing
from jaxkv.cli.arguments import parse_subject
from jaxkv.cli.output import CommandOutput

if TYPE_CHECKING:
    from jaxkv.report import RunTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Files to write, and the steps to show."""

    out: Annotated[
        Path | None, parsing.describe_default("TRACE.html, if no other file is named")
    ] = None
    """HTML page that replays the run in a browser, without network; several TRACEs
    are in columns that step together."""
    svg: Annotated[Path | None, parsing.describe_default("none")] = None
    """SVG picture of one step, see --step."""
    animate: Annotated[Path | None, parsing.describe_default("none")] = None
    """SVG animation of the steps, for a Markdown page."""
    gantt: Annotated[Path | None, parsing.describe_default("none")] = None
    """Figure of the slots over all steps, .svg or .png, or .pdf with --format pdf."""
    perfetto: Annotated[Path | None, parsing.describe_default("none")] = None
    """JSON file for ui.perfetto.dev and chrome://tracing."""
    step: int = 0
    """Step of --svg."""
    first: int = 0
    """First step of the other files."""
    last: Annotated[int | None, parsing.describe_default("the last")] = None
    """Last step of the other files."""
    title: Annotated[str | None, parsing.describe_default("the file's name")] = None
    """Title of the page."""


def main(args: list[str]) -> CommandOutput:
    """Runs `view TRACE [TRACE ...] [OPTIONS]`.

    Raises:
      ValueError: a trace cannot be read, an option is out of range, or a file cannot
        be written.
    """
    num = next((i for i, x in enumerate(args) if x.startswith("-")), len(args))
    subject, options = parse_subject(
        [*args[:1], *args[max(num, 1) :]],
        ViewOptions,
        "jaxkv view TRACE [TRACE ...]",
        "TRACE is missing: a trace.npz, or a folder that has one",
        "TRACE is a file of generate --trace, serve --trace, simulate --record or "
        "RunTrace.save, or a folder that has a trace.npz.",
    )
    from jaxkv import files
    from jaxkv.report import (
        RunTrace,
        draw_run,
        draw_step,
        make_perfetto_trace,
        render_viewer,
    )

    paths = [Path(subject), *map(Path, args[1:num])]
    traces = [RunTrace.read(path) for path in paths]
    parts = []
    for trace in traces:
        last = trace.num_steps - 1 if options.last is None else options.last
        parts.append(trace.part(options.first, last))
    stems = [path.resolve().stem for path in paths]
    out = options.out
    pictures = ("svg", "animate", "gantt", "perfetto")
    for name in pictures:
        if len(paths) > 1 and (file := getattr(options, name)) is not None:
            raise ValueError(f"--{name} {file}: needs one TRACE, not {len(paths)}")
    if out is None and all(getattr(options, name) is None for name in pictures):
        path = paths[0] / "trace" if paths[0].is_dir() else paths[0]
        out = path.with_name("-".join([path.stem, *stems[1:]]) + ".html")
    contents: dict[Path, str | bytes] = {}
    if out is not None:
        title = ", ".join(stems) if options.title is None else options.title
        names = stems if len(stems) > 1 else ()
        contents[out] = render_viewer(*parts, title=title, names=names)
    trace = traces[0]
    part = parts[0]
    if options.svg is not None:
        contents[options.svg] = draw_step(trace, options.step)
    if options.animate is not None:
        contents[options.animate] = draw_run(part)
    if options.gantt is not None:
        figures = _draw_gantt(part)
        if (name := f"figure{options.gantt.suffix}") not in figures:
            raise ValueError(
                f"--gantt {options.gantt}: must end in .svg or .png, or in .pdf "
                "with --format pdf"
            )
        contents[options.gantt] = figures[name]
    if options.perfetto is not None:
        contents[options.perfetto] = make_perfetto_trace(part)
    for file, content in contents.items():
        files.write_atomically(file, content)
    document = {
        "num_steps": part.num_steps,
        "num_requests": len(trace.requests),
        "files": [str(file) for file in contents],
    }
    return CommandOutput(document, [], [*map(str, traces), *document["files"]])


def _draw_gantt(trace: "RunTrace") -> dict[str, bytes]:
    """Returns the files of the figure of slots over steps."""
    import numpy as np

    from jaxkv.plotting import draw_slots, render_figure

    info = trace.info
    columns = [np.asarray(x) for x in (info.request_id, info.held, info.num_rows)]

    def plot(ax: Any) -> None:
        draw_slots(ax, *columns, num_steps=trace.num_steps, first=0)
        ax.set_xlabel("step [1]")
        ax.set_title("Requests in the slots")

    return render_figure(plot, size_inches=(6.8, 3.2))
