"""Seconds of a test run by use; `pytest -p tests.support.suite_seconds` prints them.

Traces, lowerings and compilations are those that JAX reports. Nested ones count once.
Processor time is that of the workers, with the subprocesses of their tests.
"""

import collections
import resource
import time
from collections.abc import Iterator

import jax.monitoring
import pytest

_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compilation or its cache",
}
_spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
"""Outermost spans of each kind of event, (start, end)."""
_totals: dict[str, float] = collections.defaultdict(float)


def _record(event: str, duration_secs: float, **_: str | int) -> None:
    if (name := _EVENTS.get(event)) is None:
        return
    end = time.monotonic()
    spans = _spans[name]
    while spans and spans[-1][0] >= end - duration_secs:
        spans.pop()
    spans.append((end - duration_secs, end))


jax.monitoring.register_event_duration_secs_listener(_record)
_start = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    yield
    _totals["start and collection"] += time.monotonic() - _start


def pytest_sessionfinish(session: pytest.Session) -> None:
    for name, spans in _spans.items():
        _totals[name] = sum(end - start for start, end in spans)
    for name, kind in (
        ("processor time", resource.RUSAGE_SELF),
        ("processor time of subprocesses", resource.RUSAGE_CHILDREN),
    ):
        usage = resource.getrusage(kind)
        _totals[name] = usage.ru_utime + usage.ru_stime
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["suite_seconds"] = dict(_totals)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Workers())


class _Workers:
    """Adds the seconds of workers, of which the controller's own are no part."""

    def pytest_testnodedown(self, node: object) -> None:
        totals = getattr(node, "workeroutput", {}).get("suite_seconds", {})
        for name, seconds in totals.items():
            _worker_totals[name] += seconds


_worker_totals: dict[str, float] = collections.defaultdict(float)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds")
    for name, seconds in (_worker_totals or _totals).items():
        terminalreporter.line(f"{seconds:8.1f}  {name}")
