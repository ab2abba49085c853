"""What the sequences of one request share: its prompt, and beams what they wrote."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.harness import Lengths, Request, length_distributions
from experiments.harness.prompts import held_out
from experiments.serving.sharing.serving import Served, Server
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs


class Savings(NamedTuple):
    """Requests of several sequences each, an entry for each setting served.

    Attributes:
      lengths: "short" or "long".
      num_sequences: answers, or beams, of a request.
      num_requests: how many there were.
      mean_prompt: tokens.
      mean_answer: tokens.
      logical_pages: pages of every sequence for itself, summed over steps.
      distinct_pages: pages in use, summed over steps.
      expected_share: saving that follows from lengths alone; not a number for beams.
      steps: that fed tokens.
      num_copied: pages copied before they were written.
      num_preempted: sequences that gave way.
      duration_s: to serve all of them.
    """

    lengths: np.ndarray
    num_sequences: np.ndarray
    num_requests: np.ndarray
    mean_prompt: np.ndarray
    mean_answer: np.ndarray
    logical_pages: np.ndarray
    distinct_pages: np.ndarray
    expected_share: np.ndarray
    steps: np.ndarray
    num_copied: np.ndarray
    num_preempted: np.ndarray
    duration_s: np.ndarray

    @property
    def saved_share(self) -> np.ndarray:
        """Pages saved / pages without sharing, both summed over steps: [settings]."""
        return 1 - self.distinct_pages / np.maximum(self.logical_pages, 1)

    def at(self, lengths: str, num_sequences: int) -> float:
        """The share saved in one setting; not a number if it was not served."""
        found = (self.lengths == lengths) & (self.num_sequences == num_sequences)
        return float(self.saved_share[found][0]) if found.any() else float("nan")


class Readings(NamedTuple):
    """Prompts of requests of several answers, read in chunks.

    Attributes:
      chunk_size: tokens that one prompt may feed in a step: [settings].
      num_sequences: answers of each request: [settings].
      prompt_tokens: of all requests, each counted once: [settings].
      prompt_rows: prompt tokens that the engine fed: [settings].
    """

    chunk_size: np.ndarray
    num_sequences: np.ndarray
    prompt_tokens: np.ndarray
    prompt_rows: np.ndarray


def serve_groups(
    server: Server,
    kinds: dict[str, Lengths],
    sizes: Iterable[int],
    ask: Sampling,
    *,
    beams: bool,
    seed: int,
    progress: Progress,
) -> Savings:
    """Serves every kind of requests with every number of sequences.

    The same requests whatever their number of sequences. They keep out of the prefix
    cache and go on after the model's own end token, so that lengths are as drawn.

    Args:
      server: an idle engine whose pool never runs short.
      kinds: lengths of the requests by name.
      sizes: sequences of a request.
      ask: how to draw; whatever matters here is replaced.
      beams: whether to search instead of drawing.
      seed: of the prompts, and of the draws.
      progress: sees a bar, and may stop; what is complete then stands.
    """
    settings = [(name, size) for name in kinds for size in sizes]
    rows: list[dict[str, Any]] = []
    label = "beam search" if beams else "parallel sampling"
    for name, size in progress.track(settings, label, "settings"):
        lengths, rng = kinds[name], np.random.default_rng(seed)
        fields = {"beam_width": size, "temperature": 1.0, "top_p": 1.0} if beams else {}
        fields |= {"n": size, "ignore_eos": True, "prefix_cache": False}
        samplings = [
            dataclasses.replace(ask, seed=seed + i, max_tokens=int(limit), **fields)
            for i, limit in enumerate(lengths.answer)
        ]
        prompts = lengths.prompt.tolist()
        requests = held_out(server.tokenizer, prompts, samplings, rng)
        served = server.serve(requests, progress=progress)
        if served is None:
            break
        rows.append(_saving(name, size, requests, served, server.config.page_size))
        if beams:
            rows[-1]["expected_share"] = float("nan")
    return Savings(**columns(Savings, rows))


def _saving(
    name: str, size: int, requests: Sequence[Request], served: Served, page_size: int
) -> dict[str, Any]:
    # As served: a file may have been shorter than the prompt drawn.
    prompts = np.array([len(request.tokens) for request in requests])
    answers = np.array([len(served.tokens[i, 0]) for i in range(len(requests))])
    lengths = Lengths(prompts, answers)
    return {
        "lengths": name,
        "num_sequences": size,
        "num_requests": len(requests),
        "mean_prompt": prompts.mean(),
        "mean_answer": answers.mean(),
        "logical_pages": served.logical_pages.sum(),
        "distinct_pages": served.distinct_pages.sum(),
        "expected_share": length_distributions.saving(lengths, size, page_size),
        "steps": len(served.num_rows),
        "num_copied": served.num_copied,
        "num_preempted": served.num_preempted,
        "duration_s": served.duration_s,
    }


def read_in_chunks(
    server: Server,
    lengths: Lengths,
    num_sequences: int,
    chunk_sizes: Iterable[int],
    *,
    seed: int,
    progress: Progress,
) -> Readings:
    """Counts the prompt tokens that several answers of a request make an engine feed.

    Args:
      server: an idle engine.
      lengths: of the requests; answers are of two tokens.
      num_sequences: answers of each request.
      chunk_sizes: tokens that one prompt may feed in a step.
      seed: of the prompts.
      progress: as in `serve_groups`.
    """
    rows: list[dict[str, Any]] = []
    fields: dict[str, Any] = {"max_tokens": 2, "prefix_cache": False, "seed": seed}
    ask = Sampling(n=num_sequences, ignore_eos=True, **fields)
    prompts, rng = lengths.prompt.tolist(), np.random.default_rng(seed)
    asks = [ask] * len(prompts)
    requests = held_out(server.tokenizer, prompts, asks, rng)
    for size in progress.track(chunk_sizes, "prompts in chunks", "chunk sizes"):
        policy = fcfs.fcfs(chunk_size=size)
        served = server.serve(requests, policy=policy, progress=progress)
        if served is None:
            break
        num_tokens = sum(len(request.tokens) for request in requests)
        rows.append(
            {
                "chunk_size": size,
                "num_sequences": num_sequences,
                "prompt_tokens": num_tokens,
                "prompt_rows": served.prompt_rows.sum(),
            }
        )
    return Readings(**columns(Readings, rows))


def columns(kind: Any, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Turns rows into the columns of a NamedTuple, empty if there are none."""
    return {name: np.array([row[name] for row in rows]) for name in kind._fields}
