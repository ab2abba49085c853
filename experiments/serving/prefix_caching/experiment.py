"""Measures hit rates of the prefix cache.

By pool size, order and eviction rule; and for models with recurrent layers, by the
interval of their checkpoints.
"""

from experiments.serving.prefix_caching import checkpoints, orders

STUDIES = (orders.STUDY, checkpoints.STUDY)
