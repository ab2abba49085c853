"""An engine that answers lists of requests, one list after the other."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.harness import terminal_text
from experiments.harness.prompts import PromptRequest
from experiments.harness.timing import CallTimes, record_call_times
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling
from jaxkv.serving import Completion
from jaxkv.serving.engine import Engine

NUM_SHOWN = 3
"""Answers that stream over the terminal at a time."""
NUM_LINES, WIDTH = 5, 76
"""Of each answer: its last lines, cut to a width."""
SHOW_EVERY_S = 0.1


class Server:
    """An engine, and the steps and times of the list that it answered last.

    Attributes:
      engine: idle between two lists; it keeps its trace.
      name: of the server in tables.
      times: of the engine's calls in the last `serve`.
    """

    def __init__(self, engine: Engine, name: str = "") -> None:
        """Takes an idle engine."""
        self.engine, self.name = engine, name
        self.times: list[CallTimes] = []

    def serve(self, prompts: list[list[int]], asks: list[Sampling]) -> list[list[int]]:
        """Returns the answers' tokens; notes the times of all calls."""
        self.engine.trace.clear()
        with record_call_times(self.engine.core) as self.times:
            done = self.engine.generate(prompts, asks)
        return [completion.tokens for completion in done]

    def stream(
        self,
        requests: list[PromptRequest],
        progress: Progress,
        update: Callable[[float], None] = lambda done: None,
    ) -> dict[int, Completion]:
        """Answers requests while a person watches the answers grow.

        Args:
          requests: what to serve; their ids are their places.
          progress: is shown the answers that grow, and asked whether to stop.
          update: takes the number of requests that are complete.

        Returns:
          The answers that are complete.
        """
        texts = [terminal_text.make_printable(request.text) for request in requests]
        running: dict[int, None] = {}
        done: dict[int, Completion] = {}
        self.engine.trace.clear()
        for i, request in enumerate(requests):
            self.engine.submit(request.tokens, request.sampling, request_id=i)
        shown_s = self.engine.now()
        for event in self.engine.stream():
            name = event.request_id
            running[name] = None
            texts[name] += event.text
            if event.completion is not None:
                done[name] = event.completion
                del running[name]
                update(len(done))
            if self.engine.now() - shown_s > SHOW_EVERY_S:
                shown_s = self.engine.now()
                blocks = []
                for i in [*running][:NUM_SHOWN]:
                    end = terminal_text.last_lines(
                        texts[i], num_lines=NUM_LINES, width=WIDTH
                    )
                    # All blocks have the same height, so that no line jumps.
                    missing = "\n" * (NUM_LINES - 1 - end.count("\n"))
                    blocks.append(f"--- request {i + 1} ---\n{end}{missing}")
                progress.show("\n".join(blocks))
            if progress.stopped:
                break
        return done

    @property
    def steps(self) -> Any:
        """A `StepInfo` of all steps of the last list, in NumPy; None without steps."""
        trace = self.engine.trace
        if not trace:
            return None
        return jax.tree.map(lambda *parts: np.concatenate(parts), *trace)
