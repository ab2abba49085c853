"""FlexAttention of torch: compiled masks, on contiguous K and V and on pages.

A single query row per sequence uses its decode kernel, which splits the keys.
"""

import functools

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from experiments.bench.kernels.peers.sdpa import Sdpa
from experiments.bench.kernels.peers.torch_peer import TorchPeer, time_work

MAX_TABLE_BYTES = 2**32
"""Largest size of the tables from pages to positions, with an entry per sequence and
page."""


class Flex(Sdpa):
    """FlexAttention on contiguous keys and values."""

    def ways(self, shape, turns):
        """Yields the only variant; its plan is the block mask."""
        attend = _compiled()
        plan_s = None
        mask = None
        if not (shape.is_equal and shape.rows == 1):
            plan = functools.partial(_mask, shape, max(shape.lengths))
            plan_s, mask = time_work(plan, self.device)
        calls = [functools.partial(attend, q, k, v, mask) for q, _, k, v in turns]
        yield "", calls, plan_s


class FlexPaged(TorchPeer):
    """FlexAttention on pages: a block mask with page-sized blocks, page lookup."""

    def draw(self, shape):
        """Draws a turn: a pool of pages, and their owners.

        Raises:
          ValueError: the tables from pages to positions would be too large.
        """
        tables, num_pages = shape.tables(may_share=False)
        if 8 * shape.batch * num_pages > MAX_TABLE_BYTES:
            raise ValueError(
                f"{shape.batch} sequences by {num_pages} pages: tables are too large"
            )
        size = (1, shape.kv_heads, num_pages * shape.page_size, shape.head_dim)
        k = shape.random(*size)
        v = shape.random(*size)
        pages = PagedAttention(num_pages, shape.page_size, shape.batch, self.device)
        for i, table in enumerate(tables):
            ids = torch.tensor(table, device=self.device)
            pages.page_table[i, : len(table)] = ids
            place = torch.arange(len(table), device=self.device)
            pages.physical_to_logical[i, ids] = place

        def keys(i):
            split = (num_pages, shape.page_size, shape.head_dim)
            return [x[0, 0].view(split)[tables[i]].flatten(0, 1) for x in (k, v)]

        return shape.queries(), keys, k, v, pages

    def ways(self, shape, turns):
        """Yields the only variant; its plan is the block mask, made and converted."""
        attend = _compiled()
        lengths = torch.tensor(shape.lengths, device=self.device)
        length = -(-max(shape.lengths) // shape.page_size) * shape.page_size

        def plan(pages):
            mask = _mask(shape, length, BLOCK_SIZE=(128, shape.page_size))
            return pages.convert_logical_block_mask(mask, kv_len=lengths)

        calls = []
        plan_s = None
        for q, _, k, v, pages in turns:
            plan_s, mask = time_work(functools.partial(plan, pages), self.device)
            calls.append(functools.partial(attend, q, k, v, mask))
        yield "", calls, plan_s


def _compiled():
    """Returns attention of queries, keys and values under a block mask."""
    torch.compiler.reset()  # otherwise every shape counts as a recompilation
    flex = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v, mask: flex(q, k, v, block_mask=mask, enable_gqa=True)


def _mask(shape, length, **blocks):
    """Returns a block mask from a function of row and position."""
    contexts = torch.tensor(shape.contexts, device=shape.device)
    kin = shape.kin
    last = shape.rows - 1

    def causal(b, h, row, place):
        return place <= contexts[b] + row

    def tree(b, h, row, place):
        node = (place - contexts[b]).clamp(0, last)
        below = place <= contexts[b] + last
        return (place < contexts[b]) | (below & kin[b, row.clamp(0, last), node])

    mask_mod = tree if shape.is_tree else causal
    batch = shape.batch
    return create_block_mask(
        mask_mod, batch, None, shape.rows, length, device=shape.device, **blocks
    )
