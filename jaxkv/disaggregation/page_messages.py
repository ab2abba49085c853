"""Messages with KV pages between workers: a JSON header and the bytes of the arrays.

The receiver validates the header against its own engine before it reads the bytes.
"""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree, UInt8

from jaxkv.disaggregation import identity
from jaxkv.memory import check_content

MAX_HEADER_BYTES = 1 << 24
MAX_PAYLOAD_BYTES = 1 << 36


class PageMessage(NamedTuple):
    """Cached pages of a prompt's prefix."""

    header: str
    """JSON: `identity`, `tokens`, `salt`, and `leaves` with dtype and shape of each."""
    payload: UInt8[np.ndarray, " bytes"]
    """The arrays one after another, each in C order."""


class PagePrefix(NamedTuple):
    """Content of a validated message."""

    tokens: list[int]
    salt: int
    pages: PyTree[np.ndarray]
    """Arrays as `Engine.take_prefix` returns them."""


def pack(
    pages: PyTree[np.ndarray],
    tokens: Sequence[int],
    salt: int,
    identity: dict[str, str],
) -> PageMessage:
    """Packs the pages of `Engine.take_prefix` with the identity of the engine."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(pages)]
    header = {
        "identity": identity,
        "tokens": list(tokens),
        "salt": salt,
        "leaves": [[leaf.dtype.name, leaf.shape] for leaf in leaves],
    }
    payload = np.concatenate([leaf.view(np.uint8).reshape(-1) for leaf in leaves])
    return PageMessage(json.dumps(header), payload)


def unpack(
    message: PageMessage,
    like: PyTree[Array | np.ndarray | jax.ShapeDtypeStruct],
    expected_identity: dict[str, str],
) -> PagePrefix:
    """Validates a message and returns its content.

    Args:
      message: result of `pack`, possibly of another process.
      like: page arrays of the receiver, `[layers, pages, ...]` each, or their shapes.
      expected_identity: identity of the receiver.

    Raises:
      ValueError: the message is damaged, or of another model or layout.
    """
    header, payload = message
    if not isinstance(header, str) or len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"header must be JSON of at most {MAX_HEADER_BYTES} bytes")
    is_bytes = isinstance(payload, np.ndarray) and payload.dtype == np.uint8
    if not is_bytes or payload.ndim != 1 or payload.nbytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"payload must be at most {MAX_PAYLOAD_BYTES} bytes of uint8")
    try:
        fields = json.loads(header)
        tokens = fields["tokens"]
        salt = fields["salt"]
        leaves = fields["leaves"]
        shapes = [(str(name), tuple(map(int, shape))) for name, shape in leaves]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"header of pages is damaged: {error!r}") from None
    if (
        wrong := identity.describe_difference(fields.get("identity"), expected_identity)
    ) is not None:
        raise ValueError(f"pages of {wrong}")
    check_content(like, shapes)
    wanted, structure = jax.tree.flatten(like)
    pairs = [*zip(wanted, (shape for _, shape in shapes), strict=True)]
    sizes = [leaf.dtype.itemsize * math.prod(shape) for leaf, shape in pairs]
    if sum(sizes) != payload.nbytes:
        raise ValueError(
            f"payload of {payload.nbytes} bytes does not fit the shapes of its header"
        )
    parts = zip(np.split(payload, np.cumsum(sizes)[:-1]), pairs, strict=True)
    page_leaves = [
        part.view(leaf.dtype).reshape(shape) for part, (leaf, shape) in parts
    ]
    return PagePrefix(tokens, salt, jax.tree.unflatten(structure, page_leaves))
