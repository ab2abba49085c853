"""Requests for disaggregated serving, and the answers of one engine."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import jaxkv
from jaxkv import Sampling
from jaxkv.disaggregation import Service
from tests.support import engines
from tests.support.folders import TOKENIZED

ENGINE: dict[str, Any] = {
    name: x for name, x in vars(engines.SERVED).items() if name != "debug"
} | {"prefix_cache": True}


def draw_prompts(seed: int, num: int) -> list[list[int]]:
    """Prompts of 2 to 23 tokens; every second one has the same first 12."""
    rng = np.random.default_rng(seed)
    common = rng.integers(5, 60, 12).tolist()
    return [
        [*(common if i % 2 else []), *rng.integers(5, 60, size).tolist()]
        for i, size in enumerate(rng.integers(2, 12, num))
    ]


def wanted(prompts: list[list[int]], ask: Sampling) -> list[list[int]]:
    """Returns the answers of one engine."""
    engine = jaxkv.Engine.load(TOKENIZED, **ENGINE)
    for name, prompt in enumerate(prompts):
        engine.submit(prompt, ask, request_id=name)
    done = {x.request_id: x.completion for x in engine.stream() if x.completion}
    return [done[name].tokens for name in range(len(prompts))]


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Waits for a condition.

    Raises:
      AssertionError: it does not hold in time.
    """
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def workers(service: Service, role: str | None = None) -> list[dict[str, Any]]:
    """Returns the workers that are up."""
    ready_workers = [x for x in service.status()["workers"] if x["state"] == "serving"]
    return [x for x in ready_workers if role is None or x["role"] == role]
