"""`Counts` written by hand, and the plans of policies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import scheduling
from jaxkv.scheduling import Counts, Plan, Policy

LINE = 4


PAGE_SIZE = 4


def counts(
    line: list[tuple[int, int, int] | str | None] = [],  # noqa: B006
    waiting: list[int] = [],  # noqa: B006
    *,
    free_pages: int,
    token_budget: int = 12,
    arrived: list[bool] | None = None,
    scored: tuple[list[int], list[int]] = ([], []),
    spare_logit_rows: int = 0,
    free_swap_pages: int = 0,
    max_length: int = 32,
    **fields: list[int],
) -> Counts:
    """Makes `Counts` of four slots and four waiting requests.

    Args:
      line: (tokens known, tokens written, pages held) of each slot, None if it is
        empty, or the pages held as a string if its sequence has finished.
      waiting: tokens of each waiting request.
      free_pages: as in `Counts`.
      token_budget: as in `Counts`.
      arrived: waiting requests that have arrived; None means all.
      scored: slots, and waiting requests, whose prompts need log-probabilities.
      spare_logit_rows: as in `Counts`.
      free_swap_pages: as in `Counts`.
      max_length: as in `Counts`.
      **fields: further fields of `Counts`; by default each request has one sequence.
    """
    rows = [entry if isinstance(entry, tuple) else (0, 0, 0) for entry in line]
    rows += [(0, 0, 0)] * (LINE - len(rows))
    columns: Any = np.array(rows, np.int32).T
    num_tokens, length, num_pages = columns
    held: Any = np.zeros(LINE, bool)
    for place, entry in enumerate(line):
        if isinstance(entry, str):
            held[place] = True
            num_pages[place] = int(entry)
    has_arrived: Any = np.zeros(LINE, bool)
    has_arrived[: len(waiting)] = True if arrived is None else arrived
    tokens: Any = np.zeros(LINE, np.int32)
    tokens[: len(waiting)] = waiting

    def marked(places: list[int]) -> Any:
        return np.isin(np.arange(LINE), places)

    runs = [isinstance(entry, tuple) for entry in line] + [False] * LINE
    running: Any = np.array(runs[:LINE])
    limits: Any = np.array([free_pages, spare_logit_rows, free_swap_pages], np.int32)
    alone: Any = np.arange(LINE, dtype=np.int32)
    more: Any = {
        name: np.array(column, bool if isinstance(column[0], bool) else np.int32)
        for name, column in fields.items()
    }
    return Counts(
        running=running,
        held=held,
        group=alone,
        target_length=num_tokens,
        length=length,
        num_pages=num_pages,
        owned_pages=num_pages,
        owned_tokens=length,
        swap_pages=num_pages,
        copies=0 * alone,
        preempted=marked([]),
        scored_prompt=marked(scored[0]),
        waiting=has_arrived,
        waiting_tokens=tokens,
        waiting_cached=0 * alone,
        waiting_slots=np.minimum(tokens, 1),
        waiting_pages=-(-tokens // PAGE_SIZE),
        waiting_scored_prompt=marked(scored[1]),
        waiting_preempted=marked([]),
        waiting_swapped=marked([]),
        free_pages=limits[0],
        free_swap_pages=limits[2],
        page_size=PAGE_SIZE,
        max_length=max_length,
        token_budget=token_budget,
        spare_logit_rows=limits[1],
    )._replace(**more)


@functools.cache
def compiled(page_size: int, max_length: int) -> Any:
    """Compiles a policy with the sizes static that are static in the engine."""

    def decide(arrays: dict, policy) -> Plan:
        sizes = dict(page_size=page_size, max_length=max_length)
        return scheduling.schedule(Counts(**arrays, **sizes), policy)

    return jax.jit(decide)


def plan_of(counts: Counts, policy: Policy) -> Plan:
    fields = counts._asdict()
    sizes = int(fields.pop("page_size")), int(fields.pop("max_length"))
    present_fields = {
        name: value for name, value in fields.items() if value is not None
    }
    arrays: dict[str, Any] = jax.tree.map(jnp.asarray, present_fields)
    arrays["token_budget"] = jnp.asarray(counts.token_budget, jnp.int32)
    return compiled(*sizes)(arrays, policy)


def check(plan: Plan, **expected: list) -> None:
    """Compares the named fields; all remaining entries must be zero."""
    for name, value in plan._asdict().items():
        want = [int(number) for number in expected.get(name, [])]
        want += [0] * (LINE - len(want))
        if value is None and name not in expected:
            continue
        assert np.asarray(value).astype(int).tolist() == want, name
