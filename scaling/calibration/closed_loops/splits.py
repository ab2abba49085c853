"""Which rows a fit of measured servers sees, and a digest of that choice.

A split is fixed before a fit: its digest is committed, and is that of the names of all
rows with their folds. Checkpoints of one shape are one model, so DeepSeek-V3 and R1 are
left out together.
"""

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from scaling.calibration.closed_loops.measured_servers import MeasuredServer
from scaling.calibration.closed_loops.row_costs import find_peak_share

type FoldKind = Literal["model", "developer"]

PLAUSIBLE_PEAK_SHARE = 0.6
"""Largest share of the peak of products that a whole server may reach. Of the public
groups one implies up to 0.87, without attention, and the others at most 0.46."""
PUBLIC_SPLIT = "6cfe9d1ef5f8b6ede0a5859e613c79466810bb20e2c0b18e2bd3ab1018023b48"
"""Digest of the split of 2,363 public rows of AIConfigurator and ML.ENERGY, committed
before the coefficients were fitted to them."""
_COPIERS = ("nvidia", "unsloth", "redhatai", "neuralmagic")
"""Owners of quantized copies of other developers' checkpoints."""


class ServerFold(NamedTuple):
    """Rows that a fit sees, and rows that it predicts."""

    name: str
    """The model or developer that is left out."""
    fitted: tuple[MeasuredServer, ...]
    held_out: tuple[MeasuredServer, ...]


def find_implausible_servers(
    servers: Iterable[MeasuredServer],
) -> tuple[MeasuredServer, ...]:
    """Returns the rows of groups that imply more than `PLAUSIBLE_PEAK_SHARE`.

    A group has one checkpoint, device, engine and format: one wrong row casts doubt on
    the setting of all of them.

    Args:
      servers: the rows; those without a time per token are never returned.
    """
    groups = defaultdict(list)
    for server in servers:
        if server.token_s is not None and not server.is_median_step:
            key = (server.checkpoint, *server.group, server.weight_format)
            groups[key].append(server)
    return tuple(
        server
        for group in groups.values()
        if max(map(find_peak_share, group)) > PLAUSIBLE_PEAK_SHARE
        for server in group
    )


def split_servers(
    servers: Sequence[MeasuredServer], kind: FoldKind
) -> tuple[ServerFold, ...]:
    """Returns a fold for each model or developer, in alphabetical order.

    Args:
      servers: the rows.
      kind: what a fold leaves out.
    """
    names = name_folds(servers, kind)
    folds = []
    for left_out in sorted({*names}):
        pairs = list(zip(servers, names, strict=True))
        fitted = tuple(x for x, name in pairs if name != left_out)
        held_out = tuple(x for x, name in pairs if name == left_out)
        folds.append(ServerFold(left_out, fitted, held_out))
    return tuple(folds)


def name_folds(servers: Sequence[MeasuredServer], kind: FoldKind) -> list[str]:
    """Returns the fold of each row: the first name of its shape, or its developer.

    The developer is the most frequent owner of the shape's checkpoints that does not
    only publish quantized copies.
    """
    shapes = [dataclasses.replace(x.model, name="") for x in servers]
    models = defaultdict(list)
    owners = defaultdict(Counter)
    for server, shape in zip(servers, shapes, strict=True):
        models[shape].append(server.model.name)
        owner = server.checkpoint.rpartition("/")[0].lower()
        owners[shape][owner] += owner not in _COPIERS
    if kind == "model":
        return [min(models[shape]) for shape in shapes]
    developers = {
        shape: max(sorted(counts), key=counts.__getitem__)
        for shape, counts in owners.items()
    }
    return [developers[shape] for shape in shapes]


def digest_split(servers: Sequence[MeasuredServer]) -> str:
    """Returns the SHA-256 of the names of the rows with both of their folds."""
    columns = (name_folds(servers, "model"), name_folds(servers, "developer"))
    rows = zip((x.name for x in servers), *columns, strict=True)
    lines = sorted("\t".join(row) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
