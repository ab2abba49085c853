"""Which worker a request goes to: a function of the work that each has.

Pass another one to the router: it takes the candidates and returns the index of one.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Candidate(NamedTuple):
    """A worker that could take a request, as the router knows it."""

    name: str
    role: str
    load: int
    """Tokens that it was asked to read or write and has not reported yet."""
    num_requests: int
    """Requests of this router that it works on."""
    cached_tokens: int
    """Tokens of this prompt, from the first on, in pages that it has had."""


type Choose = Callable[[Sequence[Candidate], int], int]
"""Takes candidates, at least one, and the prompt's tokens; returns an index."""


def least_work(workers: Sequence[Candidate], num_tokens: int) -> int:
    """Chooses the worker with the fewest tokens to do; the first of equals."""
    return min(range(len(workers)), key=lambda i: workers[i].load)


def prefix_affinity(workers: Sequence[Candidate], num_tokens: int) -> int:
    """Chooses by tokens to do once the prompt's cached tokens are subtracted."""
    return min(
        range(len(workers)), key=lambda i: workers[i].load - workers[i].cached_tokens
    )


def page_keys(tokens: Sequence[int], page_size: int, salt: int) -> list[bytes]:
    """Returns a key of every full page of a prompt, of all tokens up to its end.

    The last token is always fed, so a page that ends with it has no key.
    """
    digest, keys = hashlib.sha256(str(salt).encode()), []
    for end in range(page_size, len(tokens), page_size):
        digest.update(np.asarray(tokens[end - page_size : end], np.int32).tobytes())
        keys.append(digest.copy().digest())
    return keys
