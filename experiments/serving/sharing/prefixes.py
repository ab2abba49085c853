"""What requests with a common beginning share, if a prefix cache finds it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.harness import Lengths, Request, prompts
from experiments.serving.sharing import groups
from experiments.serving.sharing.serving import Served, Server
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling


class Prefixes(NamedTuple):
    """Requests that begin alike, served with the prefix cache and without.

    Attributes:
      prefix_tokens: with which all begin: [settings].
      num_requests: how many there were: [settings].
      prompt_tokens: of all prompts: [settings].
      num_cached: fewest tokens that a request found in the cache: [settings].
      logical_pages: as in `Savings`, with the cache: [settings].
      distinct_pages: likewise: [settings].
      prompt_rows: prompt tokens fed, without and with: [settings, 2].
      steps: without and with: [settings, 2].
      rate: answer tokens per second, without and with: [settings, repeats, 2].
      num_different: answers that are not the same with and without: [settings].
    """

    prefix_tokens: np.ndarray
    num_requests: np.ndarray
    prompt_tokens: np.ndarray
    num_cached: np.ndarray
    logical_pages: np.ndarray
    distinct_pages: np.ndarray
    prompt_rows: np.ndarray
    steps: np.ndarray
    rate: np.ndarray
    num_different: np.ndarray

    @property
    def saved_share(self) -> np.ndarray:
        """Pages saved / pages without sharing, as of `Savings`: [settings]."""
        return 1 - self.distinct_pages / np.maximum(self.logical_pages, 1)

    @property
    def speed_ups(self) -> np.ndarray:
        """Ratios of answer tokens per second: least, median, most: [settings, 3]."""
        ratios = [np.sort(rate[:, 1] / rate[:, 0]) for rate in self.rate]
        return np.array([[x[0], np.median(x), x[-1]] for x in ratios])


def serve_prefixes(
    server: Server,
    prefixes: Iterable[int],
    own: Lengths,
    ask: Sampling,
    *,
    repeats: int,
    seed: int,
    progress: Progress,
) -> Prefixes:
    """Serves requests with a common beginning, again and again, with and without cache.

    The beginning is read before the clock starts, as a provider's own prompt would be.
    Without means that the requests keep out of the cache: one program runs both, and
    which goes first alternates.

    Args:
      server: an engine with a prefix cache.
      prefixes: tokens with which all requests begin.
      own: tokens that each request has beyond them, and its answer's.
      ask: how to draw; whatever matters here is replaced.
      repeats: servings of each kind, at least 1.
      seed: of the texts, and of the draws.
      progress: as in `serve_groups`.
    """
    rows: list[dict[str, Any]] = []
    for num in progress.track(prefixes, "common beginnings", "lengths"):
        first, requests = _alike(server, num, own, ask, seed)
        runs: dict[bool, list[Served]] = {False: [], True: []}
        for turn in range(2 * repeats):
            uses = turn % 4 in (1, 2)
            asked = [_using(request, uses) for request in requests]
            server.clear()
            server.serve([first], progress=progress)
            served = server.serve(asked, progress=progress)
            if served is None:
                return Prefixes(**groups.columns(Prefixes, rows))
            runs[uses].append(served)
        rows.append(_prefix(num, requests, runs))
    return Prefixes(**groups.columns(Prefixes, rows))


def _prefix(
    num: int, requests: Sequence[Request], runs: dict[bool, list[Served]]
) -> dict[str, Any]:
    off, on = runs[False][0], runs[True][0]
    answers = sum(map(len, on.tokens.values()))
    pairs = zip(runs[False], runs[True], strict=True)
    return {
        "prefix_tokens": num,
        "num_requests": len(requests),
        "prompt_tokens": sum(len(request.tokens) for request in requests),
        "num_cached": on.num_cached.min(),
        "logical_pages": on.logical_pages.sum(),
        "distinct_pages": on.distinct_pages.sum(),
        "prompt_rows": [x.prompt_rows.sum() for x in (off, on)],
        "steps": [len(x.num_rows) for x in (off, on)],
        "rate": [[answers / x.duration_s for x in pair] for pair in pairs],
        "num_different": sum(off.tokens[name] != on.tokens[name] for name in on.tokens),
    }


def _alike(
    server: Server, num: int, own: Lengths, ask: Sampling, seed: int
) -> tuple[Request, list[Request]]:
    """A request that leaves `num` tokens in the cache, and those that go on there."""
    samplings = [
        dataclasses.replace(ask, n=1, ignore_eos=True, seed=seed + i, max_tokens=limit)
        for i, limit in enumerate(own.answer.tolist())
    ]
    first, *rest = prompts.held_out(
        server.tokenizer,
        [num, *own.prompt.tolist()],
        [Sampling.greedy(max_tokens=1), *samplings],
        np.random.default_rng(seed),
    )
    return first, [x._replace(tokens=first.tokens + x.tokens) for x in rest]


def _using(request: Request, uses: bool) -> Request:
    sampling = dataclasses.replace(request.sampling, prefix_cache=uses)
    return request._replace(sampling=sampling)
