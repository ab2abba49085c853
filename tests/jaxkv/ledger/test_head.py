"""The head of the queue, worked by hand."""

import jax.numpy as jnp

from jaxkv import ledger
from jaxkv.ledger import PROGRESS, PageFacts, RequestColumns
from jaxkv.scheduling import RequestAttributes
from tests.support.trees import ints


def test_one_swapped_page_makes_a_swapped_request() -> None:
    """A request resumes with the pages that it had, and one without any starts."""
    books = ledger.make_ledger(
        num_slots=1, num_places=2, num_sequences=2, has_groups=False, holds=False
    )
    progress = PROGRESS.write(
        books.progress,
        ints(0, 1),
        num_tokens=ints(9, 9),
        num_preempted=ints(1, 1),
        swapped_tokens=ints(4, 0),
        swapped_pages=ints(1, 0),
    )
    books = books._replace(
        progress=progress, queue=ints(0, 1), num_waiting=jnp.int32(2)
    )
    head = ledger.look_up_head(books, books.queue, books.queue[:, None])
    zeros = jnp.zeros(1, jnp.int32)
    counts = ledger.observe(
        books,
        head,
        ints(-1),
        RequestColumns(jnp.zeros((2, 2), jnp.int32), ints(16, 16), RequestAttributes()),
        PageFacts(*(zeros,) * 6, None, jnp.int32(8), jnp.int32(0)),
        num_pages=8,
        page_size=4,
        max_length=16,
        token_budget=16,
    )
    assert counts.waiting_swapped.tolist() == [True, False]
    assert counts.waiting_tokens.tolist() == [9, 9]
    assert counts.waiting_pages.tolist() == [3, 3]
