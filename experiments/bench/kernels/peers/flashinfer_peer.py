"""FlashInfer over pages: its kernels for decoding, for prefill, and for prefixes."""

import flashinfer
import torch

from experiments.bench.kernels.peers.torch_peer import Peer, Turn, stopwatch

WORKSPACE_BYTES = 512 * 2**20
"""Room for partial results, as its examples have it, and more for large batches."""


class FlashInfer(Peer):
    """Planned once for each turn, outside of what is timed.

    Raises:
      ValueError: there is no GPU.
    """

    def __init__(self, num_threads):
        super().__init__(num_threads)
        if self.device == "cpu":
            raise ValueError("it needs a GPU")
        self.version = flashinfer.__version__
        self._workspace = torch.zeros(
            WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
        )

    def draw(self, shape):
        """Draws a turn: pages head after head, and the tables over them."""
        tables, num_pages = shape.tables(may_share=True)
        size = (num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        k, v = shape.random(*size), shape.random(*size)

        def keys(i):
            ids = torch.tensor(tables[i], device=self.device)
            return [x[ids, 0].flatten(0, 1) for x in (k, v)]

        q = shape.queries()
        # Its rows lie one after the other, all heads of each side by side.
        rows = q.transpose(1, 2).flatten(0, 1).contiguous()
        return Turn(q, keys, rows, (k, v), tables)

    def ways(self, shape, turns):
        """Yields its wrapper for such rows; for single rows more than one."""
        if shape.rows > 1:
            yield self._way("prefill", shape, turns, self._prefill)
            return
        if shape.shared:
            yield self._way("cascade", shape, turns, self._cascade)
        name = "decode, tensor cores"
        yield self._way(name, shape, turns, self._decode_on_tensor_cores)
        if shape.q_heads < 4 * shape.kv_heads:
            yield self._way("decode", shape, turns, self._decode)

    def _way(self, how, shape, turns, make):
        """Plans all turns with a wrapper each."""
        runs, plan_s = [], None
        for turn in turns:
            wrapper, plan = make(shape, turn.rest[2])
            plan_s, _ = stopwatch(plan, self.device)
            runs.append(wrapper)

        def call(turn):
            rows, pages, _ = turn.rest
            out = runs[turns.index(turn)].run(rows, pages)
            return out.unflatten(0, (shape.batch, shape.rows)).transpose(1, 2)

        return how, call, plan_s

    def _decode(self, shape, tables, *, use_tensor_cores=False):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=use_tensor_cores
        )
        lists = self._lists(shape, tables)
        return wrapper, lambda: wrapper.plan(*lists, *_sizes(shape), **_types(shape))

    def _decode_on_tensor_cores(self, shape, tables):
        return self._decode(shape, tables, use_tensor_cores=True)

    def _prefill(self, shape, tables):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        lists = [self._starts(shape.rows, shape.batch), *self._lists(shape, tables)]
        options = dict(causal=True)
        if shape.is_tree:
            seen = shape.seen(max(shape.lengths))
            mask = [
                rows[:, :length].flatten()
                for rows, length in zip(seen, shape.lengths, strict=True)
            ]
            options = dict(custom_mask=torch.cat(mask))
        options |= _types(shape)
        return wrapper, lambda: wrapper.plan(*lists, *_sizes(shape), **options)

    def _cascade(self, shape, tables):
        """Two levels: the prefix, seen by all rows, then what each has of its own."""
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
            2, self._workspace, "HND"
        )
        num_shared = shape.shared // shape.page_size
        own = self._lists(shape, [table[num_shared:] for table in tables])
        prefix = [
            self._ints([0, num_shared]),
            self._ints(tables[0][:num_shared]),
            self._ints([shape.page_size]),
        ]
        levels = [list(level) for level in zip(prefix, own, strict=True)]
        rows = [self._ints([0, shape.batch]), self._starts(1, shape.batch)]
        return wrapper, lambda: wrapper.plan(
            rows, *levels, *_sizes(shape), **_types(shape)
        )

    def _lists(self, shape, tables):
        """Where each sequence's pages begin, all pages, and places in the last."""
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


def _sizes(shape):
    return shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size


def _types(shape):
    return dict(q_data_type=shape.dtype, kv_data_type=shape.dtype)
