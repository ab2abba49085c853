"""Attention over paged KV arrays: arrays in, arrays out, with a plain reference.

A room for each operation, whose face holds what is public:

    from pallas_kernels.paged_attention import make_plan, merge_states, paged_attention
    from pallas_kernels.page_ops import copy_pages, write_rows
    from pallas_kernels.flash_attention import flash_attention
    from pallas_kernels.grouped_matmul import grouped_matmul

`paged_attention` attends from rows to pages, in one plan a step (`make_plan`);
`merge_states` puts attention over parts of the keys together. `write_rows` and
`copy_pages` fill and copy pages, `quantizing` is for pages of 8 bits, and
`flash_attention` is for keys that are not in pages. `grouped_matmul` multiplies rows by
the weights of their group, as mixtures of experts do.
"""
