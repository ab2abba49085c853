"""FlashInfer with pages: its kernels for decode, prefill, and shared prefixes."""

import flashinfer
import torch

from experiments.bench.kernels.peers.torch_peer import TorchPeer, time_work

WORKSPACE_BYTES = 512 * 2**20
"""Memory for partial results: as in its examples, with a margin for large batches."""


class FlashInfer(TorchPeer):
    """FlashInfer, with a plan per turn that is not timed."""

    version = flashinfer.__version__
    needs_gpu = True

    def __init__(self, num_threads):
        super().__init__(num_threads)
        self._workspace = torch.zeros(
            WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
        )

    def draw(self, shape):
        """Draws a turn: head-major pages, and their page tables."""
        tables, num_pages = shape.tables(may_share=True)
        size = (num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        k = shape.random(*size)
        v = shape.random(*size)

        def keys(i):
            return [x[tables[i], 0].flatten(0, 1) for x in (k, v)]

        return shape.queries(), keys, (k, v), tables

    def ways(self, shape, turns):
        """Yields its wrappers for the rows; several for single rows."""
        if shape.rows > 1:
            yield self._way("prefill", shape, turns, self._prefill)
            return
        if shape.shared:
            yield self._way("cascade", shape, turns, self._cascade)
        yield self._way("decode, tensor cores", shape, turns, self._decode, True)
        if shape.q_heads < 4 * shape.kv_heads:
            yield self._way("decode", shape, turns, self._decode, False)

    def _way(self, how, shape, turns, make, *options):
        """Plans all turns with one wrapper each."""
        sizes = (shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size)
        types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}

        def ready(turn):
            q, _, pages, tables = turn
            wrapper, lists, masks = make(shape, tables, *options)
            plan_s, _ = time_work(
                lambda: wrapper.plan(*lists, *sizes, **masks, **types), self.device
            )
            # FlashInfer expects rows as [rows, heads, head_dim].
            rows = q.transpose(1, 2).flatten(0, 1).contiguous()

            def call():
                out = wrapper.run(rows, pages)
                return out.unflatten(0, (shape.batch, shape.rows)).transpose(1, 2)

            return call, plan_s

        calls, plans_s = zip(*map(ready, turns), strict=True)
        return how, calls, plans_s[-1]

    def _decode(self, shape, tables, use_tensor_cores):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=use_tensor_cores
        )
        return wrapper, self._lists(shape, tables), {}

    def _prefill(self, shape, tables):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        lists = [self._starts(shape.rows, shape.batch), *self._lists(shape, tables)]
        if not shape.is_tree:
            return wrapper, lists, {"causal": True}
        masks = [
            shape.attention_mask(i, n).flatten() for i, n in enumerate(shape.lengths)
        ]
        return wrapper, lists, {"custom_mask": torch.cat(masks)}

    def _cascade(self, shape, tables):
        """Two levels: the shared prefix, and the own pages of each sequence."""
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
            2, self._workspace, "HND"
        )
        num_shared = shape.shared // shape.page_size
        suffixes = self._lists(shape, [table[num_shared:] for table in tables])
        prefix = ([0, num_shared], tables[0][:num_shared], [shape.page_size])
        levels = [[self._ints(x), y] for x, y in zip(prefix, suffixes, strict=True)]
        rows = [self._ints([0, shape.batch]), self._starts(1, shape.batch)]
        return wrapper, [rows, *levels], {}

    def _lists(self, shape, tables):
        """Returns the start of each sequence's pages, all pages, and last lengths."""
        starts = [0]
        for table in tables:
            starts.append(starts[-1] + len(table))
        last = [(length - 1) % shape.page_size + 1 for length in shape.lengths]
        pages = [page for table in tables for page in table]
        return [self._ints(x) for x in (starts, pages, last)]

    def _starts(self, step, count):
        return self._ints(range(0, step * count + 1, step))

    def _ints(self, values):
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)
