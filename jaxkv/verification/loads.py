"""Random loads of small requests, as tables from which rows can be removed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import validation
from jaxkv.scheduling import NO_DEADLINE, RequestAttributes
from jaxkv.simulation import pad_workload
from jaxkv.workloads import Workload, make_workload

LONGEST_PART = 20
"""Longest prompt, and longest answer."""
MAX_SEQUENCES_EACH = 2
"""Largest number of sequences of a request."""
_WIDTH = 3
"""Largest number of requests that a request waits for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomRequest:
    """A request of a random load."""

    arrival_s: float
    """Arrival time; without effect if the request waits for others."""
    prompt: int
    output: int
    samples: int
    after: tuple[int, ...] = ()
    """Requests, by their index in the load, that it waits for."""
    delay_s: float = 0.0
    priority: int = 0
    deadline_ms: int = NO_DEADLINE
    session: int = -1
    predicted_length: int = 0


@dataclasses.dataclass(frozen=True)
class RandomLoad:
    """Requests of a load, in order of arrival, with the seed that drew them."""

    seed: int
    requests: tuple[RandomRequest, ...]

    def __str__(self) -> str:
        """A line for each request, without fields that have their default."""
        lines = []
        for i, request in enumerate(self.requests):
            plain = {x.name: x.default for x in dataclasses.fields(request)}
            fields = {
                name: value
                for name, value in dataclasses.asdict(request).items()
                if value != plain[name]
            }
            shown = ", ".join(f"{name}={value}" for name, value in fields.items())
            lines.append(f"request {i}: {shown}")
        return "\n".join(lines)

    def workload(self, num: int | None = None) -> Workload:
        """Returns the workload, padded to `num` requests.

        Every load has dependencies and attributes, so that equal sizes share a program.
        """
        rows = self.requests

        def column(name: str) -> Any:
            return np.array([getattr(row, name) for row in rows])

        after = np.full((len(rows), _WIDTH), -1)
        for i, row in enumerate(rows):
            after[i, : len(row.after)] = row.after
        names = ("priority", "deadline_ms", "session", "predicted_length")
        w = make_workload(
            column("arrival_s"),
            column("prompt"),
            column("output"),
            after=after,
            delay_s=np.where(after[:, 0] < 0, 0.0, column("delay_s")),
            attributes=RequestAttributes(**{name: column(name) for name in names}),
        )
        w = w._replace(
            samples=jnp.asarray(column("samples"), jnp.int32),
            limit=w.prompt + w.output,
        )
        size = len(rows) if num is None else num
        return jax.tree.map(jnp.asarray, pad_workload(w, size, (_WIDTH, size, size)))

    def without(self, indices: Sequence[int]) -> "RandomLoad":
        """Returns the load without some requests; no request waits for them."""
        keep = [i for i in range(len(self.requests)) if i not in {*indices}]
        place = {old: new for new, old in enumerate(keep)}
        remaining = []
        for i in keep:
            row = self.requests[i]
            after = tuple(place[x] for x in row.after if x in place)
            remaining.append(dataclasses.replace(row, after=after))
        return RandomLoad(self.seed, tuple(remaining))


@validation.checks_numbers(seed=validation.SEEDS)
def draw_random_load(seed: int, num: int) -> RandomLoad:
    """Draws a load: half of them with sessions, some with bursts of arrivals.

    A step takes about 1 s. Arrivals, sizes and attributes are random; the arrival times
    ascend, also for requests that wait for others.
    """
    rng = np.random.default_rng(seed)
    has_sessions = rng.random() < 0.5
    gap_s = rng.choice([0.2, 1.0, 4.0])
    longest = int(rng.choice([4, LONGEST_PART]))
    has_samples = rng.random() < 0.5
    arrival_s = np.cumsum(rng.exponential(gap_s, num)).round(3)
    arrival_s[: int(rng.integers(1, 5))] = 0.0
    requests = []
    for i in range(num):
        after: tuple[int, ...] = ()
        if has_sessions and i and rng.random() < 0.7:
            recent = np.arange(max(0, i - 6), i)
            size = min(recent.size, int(rng.integers(1, _WIDTH + 1)))
            after = tuple(sorted(rng.choice(recent, size, replace=False).tolist()))
        lengths = int(rng.integers(1, longest + 1)), int(rng.integers(1, longest + 1))
        requests.append(
            RandomRequest(
                arrival_s=float(arrival_s[i]),
                prompt=lengths[0],
                output=lengths[1],
                samples=int(rng.integers(1, MAX_SEQUENCES_EACH + 1))
                if has_samples
                else 1,
                after=after,
                delay_s=float(rng.choice([0.0, 0.5, 7.25])) if after else 0.0,
                priority=int(rng.integers(-3, 4)),
                deadline_ms=int(rng.choice([NO_DEADLINE, rng.integers(0, 90_000)])),
                session=int(rng.integers(-1, 5)),
                predicted_length=int(rng.choice([0, sum(lengths)])),
            )
        )
    return RandomLoad(seed, tuple(requests))
