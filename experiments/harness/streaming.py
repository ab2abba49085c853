"""Serves a list of requests while a person watches the answers grow."""

from collections.abc import Callable

from experiments.harness import showing
from experiments.harness.prompts import Request
from jaxkv.progress import Progress
from jaxkv.serving import Completion
from jaxkv.serving.engine import Engine

NUM_SHOWN = 3
"""Answers that stream over the terminal at a time."""
NUM_LINES, WIDTH = 5, 76
"""Of each answer: its last lines, cut to a width."""
SHOW_EVERY_S = 0.1


def stream(
    engine: Engine,
    requests: list[Request],
    progress: Progress,
    update: Callable[[float], None] = lambda done: None,
) -> dict[int, Completion]:
    """Runs an engine to its end, or until it is stopped.

    Args:
      engine: with nothing in it.
      requests: what to serve; their ids are their places.
      progress: is shown the answers that grow, and asked whether to stop.
      update: takes the number of requests that are complete.

    Returns:
      The answers that are complete.
    """
    texts = [showing.visible(request.text) for request in requests]
    running: dict[int, None] = {}
    done: dict[int, Completion] = {}
    for i, request in enumerate(requests):
        engine.submit(request.tokens, request.sampling, request_id=i)
    shown_s = engine.now()
    for event in engine.stream():
        name = event.request_id
        running[name] = None
        texts[name] += event.text
        if event.completion is not None:
            done[name] = event.completion
            del running[name]
            update(len(done))
        if engine.now() - shown_s > SHOW_EVERY_S:
            shown_s = engine.now()
            progress.show(_screen(texts, list(running)))
        if progress.stopped:
            break
    return done


def _screen(texts: list[str], running: list[int]) -> str:
    """The ends of the texts that grow: those of the oldest requests."""
    blocks = []
    for name in running[:NUM_SHOWN]:
        end = showing.last_lines(texts[name], num_lines=NUM_LINES, width=WIDTH)
        # Every block is as high as the others, so that nothing jumps.
        missing = "\n" * (NUM_LINES - 1 - end.count("\n"))
        blocks.append(f"--- request {name + 1} ---\n{end}{missing}")
    return "\n".join(blocks)
