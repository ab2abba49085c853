"""Everyone is measured in turns, round after round: a disturbance hits all alike."""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from experiments.plotting import systems
from jaxkv.progress import Progress


def in_turns[C](
    cases: Iterable[C],
    num_rounds: int,
    begin: Callable[[C], list[Any]],
    measure: Callable[[C, Any], Any],
    *,
    progress: Progress,
    doing: str,
    what: str,
) -> Iterator[tuple[C, list[Any], dict[str, list[Any]]]]:
    """Measures everyone on case after case.

    Args:
      cases: what is measured.
      num_rounds: turns of each, at least 1.
      begin: prepares everyone for a case; they have names.
      measure: measures one of them on a case.
      progress: is told of every turn; when it ends early, the case is left out.
      doing: what is done, in a word.
      what: a case is.

    Yields:
      The case, everyone, and their measurements by name.
    """
    turns = [(case, turn) for case in cases for turn in range(num_rounds + 1)]
    everyone: list[Any] = []
    found: dict[str, list[Any]] = {}
    for case, turn in progress.track(turns, doing, "turns"):
        if turn == 0:
            progress.show(f"{what} {case}, warming up")
            everyone = begin(case)
            found = {each.name: [] for each in everyone}
            continue
        for each in everyone:
            progress.show(f"{what} {case}, {each.name}")
            found[each.name].append(measure(case, each))
        if turn == num_rounds:
            yield case, everyone, found


def timed[**P, R](
    work: Callable[P, R], *args: P.args, **options: P.kwargs
) -> tuple[R, float]:
    """What work gives, and the seconds that it takes."""
    start = time.perf_counter()
    done = work(*args, **options)
    return done, time.perf_counter() - start


def middle(rates: Collection[float]) -> tuple[float, float]:
    """The median of rates, and the share of it that they spread over."""
    rate = statistics.median(rates)
    return rate, (max(rates) - min(rates)) / rate


def split(
    rows: Sequence[dict[str, Any]], names: Collection[str], details: Collection[str]
) -> dict[str, Any]:
    """Rows for JSON: what to compare, and apart from it what to know of everyone.

    Args:
      rows: of a result.
      names: of what stands in both, for it tells one row from another.
      details: names of what to know.
    """
    return {
        "rows": [{k: v for k, v in row.items() if k not in details} for row in rows],
        "details": [{k: row[k] for k in (*names, *details)} for row in rows],
    }


def draw_bars(
    ax: Any, names: Sequence[str], values: Sequence[float], labels: Sequence[str]
) -> None:
    """Draws a bar for each name from the top down, in the colour of that system."""
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        look = systems.look(name if name in systems.SYSTEMS else "plain Python")
        bar = ax.barh(place, value, 0.7, **look.bar)
        ax.bar_label(bar, [labels[place]], padding=3)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.18)
    ax.invert_yaxis()
