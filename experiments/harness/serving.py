"""An engine that serves lists of requests one after another."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.harness.prompts import PromptRequest
from experiments.harness.timing import CallTimes, record_call_times
from jaxkv.cli import last_lines, make_printable
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling
from jaxkv.serving import Completion, Engine

NUM_SHOWN = 3
"""Answers that stream on the terminal at the same time."""
NUM_LINES = 5
LINE_WIDTH = 76
"""Lines shown of each answer, and their width in characters."""
SHOW_EVERY_S = 0.1


class Server:
    """An engine, with the steps and call times of the last list that it served.

    Attributes:
      engine: engine, idle between two lists; keeps its trace.
      name: name of the server in tables.
      times: times of the engine's calls in the last `serve`.
    """

    def __init__(self, engine: Engine, name: str = "") -> None:
        """Takes an idle engine."""
        self.engine = engine
        self.name = name
        self.times: list[CallTimes] = []

    def serve(self, prompts: list[list[int]], asks: list[Sampling]) -> list[list[int]]:
        """Returns the tokens of the answers, and records the times of all calls."""
        self.engine.trace.clear()
        with record_call_times(self.engine) as self.times:
            done = self.engine.generate(prompts, asks)
        return [completion.tokens for completion in done]

    def stream(
        self,
        requests: list[PromptRequest],
        progress: Progress,
        update: Callable[[float], None] = lambda done: None,
    ) -> dict[int, Completion]:
        """Serves requests and shows the growing answers on the terminal.

        Args:
          requests: requests; their ids are their indices.
          progress: shows the answers, and decides whether to stop.
          update: called with the number of completed requests.

        Returns:
          The completed answers.
        """
        texts = [make_printable(request.text) for request in requests]
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
                    end = last_lines(texts[i], num_lines=NUM_LINES, width=LINE_WIDTH)
                    # All blocks have the same height, so that lines stay in place.
                    missing = "\n" * (NUM_LINES - 1 - end.count("\n"))
                    blocks.append(f"--- request {i + 1} ---\n{end}{missing}")
                progress.show("\n".join(blocks))
            if progress.stopped:
                break
        return done

    @property
    def steps(self) -> Any:
        """`StepInfo` of all steps of the last list, in NumPy; None without steps."""
        trace = self.engine.trace
        if not trace:
            return None
        return jax.tree.map(lambda *parts: np.concatenate(parts), *trace)
