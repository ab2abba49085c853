"""Everyone is measured in turns, round after round: a disturbance hits all alike."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
