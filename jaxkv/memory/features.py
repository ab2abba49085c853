"""Features of tokens, stored on the pages: hidden states and the chosen experts.

A drafting head reads hidden states of tokens computed in earlier steps, or by another
request with a shared prefix. A recorded route is that of the pass which computed the
token's K and V. Both are therefore leaves of `Pages`, at the places of their tokens,
and are copied, shared, swapped and saved with K and V.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkv import arrays
from jaxkv.memory import kv_pages, page_parts
from jaxkv.memory.kv_pages import Pages, Rows
from pallas_kernels.page_ops import write_rows


def write_features(
    pages: Pages, values: Float[Array, "rows width"], rows: Rows
) -> Pages:
    """Writes the features of every row to the row's place, in place, with a cast.

    Padding rows and rows whose place is unmapped are dropped.

    Raises:
      ValueError: the pages have no features, or features of another width.
    """
    stored = _checked_features(pages)
    if (width := 2 * stored.shape[4]) != values.shape[1]:
        raise ValueError(f"{values.shape[1]=} must be the pages' {width}")
    page, offset = kv_pages.locate(rows, page_size=pages.page_size)
    halves = values.reshape(values.shape[0], 2, -1)
    written, _ = write_rows(kv_pages.flatten_layers(stored), page, offset, halves)
    return pages._replace(features=kv_pages.unflatten_layers(written, stored.shape))


def read_features(
    pages: Pages, rows: Rows, places: Int32[Array, " rows"]
) -> Float[Array, "rows width"]:
    """Reads the features at other places of the rows' sequences.

    Returns:
      Features of the tokens at `places`; zeros if there is no such token, such as
      before the first token.

    Raises:
      ValueError: the pages have no features.
    """
    row_view = rows._replace(position=places, place=None)
    page, offset = kv_pages.locate(row_view, page_size=pages.page_size)
    where = _checked_features(pages).at[0, page, :, offset]
    halves = where.get(mode="fill", fill_value=0, wrap_negative_indices=False)
    halves = page_parts.broadcast_from_owner(halves)
    return halves.reshape(halves.shape[0], -1)


def write_routes(
    pages: Pages, routes: Int32[Array, "rows mixtures top_k"], rows: Rows
) -> Pages:
    """Writes the experts of every row to the row's place, in place.

    Padding rows and rows whose place is unmapped are dropped.
    """
    stored = pages.routes
    assert stored is not None  # checked by the caller
    page, offset = kv_pages.locate(rows, page_size=pages.page_size)
    written, _ = write_rows(kv_pages.flatten_layers(stored), page, offset, routes)
    return pages._replace(routes=kv_pages.unflatten_layers(written, stored.shape))


def read_routes(
    pages: Pages, page_ids: Int32[Array, "slots pages_per_slot"]
) -> Int32[Array, "slots places mixtures top_k"]:
    """Reads the experts of the tokens on the pages of every slot.

    They are arbitrary at places without a token.
    """
    stored = pages.routes
    assert stored is not None  # checked by the caller
    leaf = stored[0, jnp.maximum(page_ids, 0)]
    if page_parts.num_page_parts() > 1:
        leaf = lax.all_gather(leaf, page_parts.CONTEXT, axis=3, tiled=True)
    tokens = leaf.swapaxes(2, 3)
    return tokens.reshape(tokens.shape[0], -1, *tokens.shape[3:])


def parent_places(rows: Rows) -> Int32[Array, " rows"]:
    """Returns the place of the token before each row, or of its parent in a token tree.

    The result is negative if there is no such token.
    """
    places = rows.places
    if rows.context is None or rows.ancestors is None:
        return places - 1
    context = arrays.take(rows.context, kv_pages.slots_of(rows), fill=-1)
    column = jnp.arange(rows.ancestors.shape[1], dtype=jnp.int32)[None, :]
    column_of_row = places - context
    kin = rows.ancestors & (column < column_of_row[:, None])
    parent = context + jnp.max(jnp.where(kin, column, -1), axis=1)
    return jnp.where((context >= 0) & (column_of_row >= 0), parent, places - 1)


def _checked_features(pages: Pages) -> Float[Array, "1 pages 2 page_size half"]:
    if pages.features is None:
        raise ValueError("the pages have no features; make_pages takes their number")
    return pages.features
