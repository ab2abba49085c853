"""The shape that a peer is asked for, in torch: what is seen, and what is right."""

import torch

NUM_CHECKED_ROWS = 16
"""Last rows of a sequence that are held against float64."""


class Shape:
    """Ragged rows behind their contexts.

    Args:
      asked: `contexts`, tokens before the rows of each sequence, of which all have the
        first `shared` in common; `rows` of each; `heads`, those of queries, of keys,
        and their size; `page_size`; `dtype`; `is_tree`, whether rows are the nodes of
        random trees, else each sees those before it.
      device: where arrays are drawn.
    """

    def __init__(self, asked, device):
        self.contexts, self.rows = asked["contexts"], asked["rows"]
        self.q_heads, self.kv_heads, self.head_dim = asked["heads"]
        self.page_size, self.shared = asked["page_size"], asked["shared"]
        self.is_tree = asked["is_tree"]
        self.device, self.dtype = device, getattr(torch, asked["dtype"])
        self.batch = len(self.contexts)
        self.lengths = [context + self.rows for context in self.contexts]
        self.is_equal = len(set(self.contexts)) == 1
        self.kin = self._draw_kin()

    def _draw_kin(self):
        """Which rows each row sees, itself among them: `[batch, rows, rows]`."""
        shape = (self.batch, self.rows, self.rows)
        if not self.is_tree:
            return torch.ones(shape, dtype=torch.bool, device=self.device).tril()
        kin = torch.zeros(shape, dtype=torch.bool)
        for tree in kin:
            for row in range(self.rows):
                if row:
                    tree[row] = tree[int(torch.randint(0, row, ()))]
                tree[row, row] = True
        return kin.to(self.device)

    def random(self, *shape):
        """Normal numbers."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def queries(self):
        """Queries: `[batch, q_heads, rows, head_dim]`."""
        return self.random(self.batch, self.q_heads, self.rows, self.head_dim)

    def seen(self, length):
        """Which places each row sees: `[batch, rows, length]`."""
        shape = (self.batch, self.rows, length)
        seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        for i, context in enumerate(self.contexts):
            seen[i, :, :context] = True
            seen[i, :, context : context + self.rows] = self.kin[i]
        return seen

    def tables(self, *, may_share):
        """Pages of each sequence in random order, and how many there are.

        Args:
          may_share: whether the shared prefix lies in pages of all sequences.
        """
        num_shared = self.shared // self.page_size if may_share else 0
        counts = [-(-length // self.page_size) for length in self.lengths]
        num_pages = num_shared + sum(count - num_shared for count in counts)
        free = torch.randperm(num_pages).tolist()
        prefix, rest = free[:num_shared], free[num_shared:]
        tables = []
        for count in counts:
            own = count - num_shared
            tables.append([*prefix, *rest[:own]])
            rest = rest[own:]
        return tables, num_pages

    def error(self, q, keys, out):
        """Holds the first and the longest sequence, their last rows, to float64.

        Args:
          q: queries.
          keys: gives keys and values of KV head 0 of sequence i, `[length, head_dim]`.
          out: the answer, as q.
        """
        group = self.q_heads // self.kv_heads
        rows = slice(max(0, self.rows - NUM_CHECKED_ROWS), None)
        off = norm = 0.0
        for i in (0, self.lengths.index(max(self.lengths))):
            k, v = (x[: self.lengths[i]].double() for x in keys(i))
            scores = q[i, :group, rows].double() @ k.T / self.head_dim**0.5
            kin = self.kin[i, rows]
            before = kin.new_ones(len(kin), self.contexts[i])
            seen = torch.cat([before, kin], dim=1)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            wanted = weights @ v
            off += float(((out[i, :group, rows].double() - wanted) ** 2).sum())
            norm += float((wanted**2).sum())
        return (off / norm) ** 0.5
