"""Routing: chooses the worker of a request from the load of each worker.

A router takes any function with the signature `Choose`.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Candidate(NamedTuple):
    """A worker that could take a request, as known to the router."""

    name: str
    role: str
    load: int
    """Tokens that the router has requested from it and that are not complete."""
    num_requests: int
    """Requests of this router that are in progress on the worker."""
    cached_tokens: int
    """Leading tokens of this prompt in pages that the worker has had."""


type Choose = Callable[[Sequence[Candidate], int], int]
"""Takes candidates, at least one, and the number of prompt tokens; returns an index."""


def least_work(workers: Sequence[Candidate], num_tokens: int) -> int:
    """Chooses the worker with the fewest tokens in progress; ties go to the first."""
    return min(range(len(workers)), key=lambda i: workers[i].load)


def prefix_affinity(workers: Sequence[Candidate], num_tokens: int) -> int:
    """Chooses the worker with the fewest tokens in progress minus cached tokens."""
    return min(
        range(len(workers)), key=lambda i: workers[i].load - workers[i].cached_tokens
    )


def page_keys(tokens: Sequence[int], page_size: int, salt: int) -> list[bytes]:
    """Returns a key for every full page of a prompt: a hash of all tokens so far.

    The last token is always fed, so a page that ends with it has no key.
    """
    digest = hashlib.sha256(str(salt).encode())
    keys = []
    for end in range(page_size, len(tokens), page_size):
        digest.update(np.asarray(tokens[end - page_size : end], np.int32).tobytes())
        keys.append(digest.copy().digest())
    return keys
