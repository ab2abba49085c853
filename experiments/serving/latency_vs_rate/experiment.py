"""Measures the load that a GPU sustains with paged memory.

Reproduces the serving experiments of the PagedAttention paper in simulated time. The
scheduler is the engine's, lengths follow the printed means, and a cost model of a step
replaces the GPUs. Two recorded hours of a cloud's requests are replayed, one of them
under policies that use priorities, deadlines, sessions and predicted lengths.
"""

from experiments.serving.latency_vs_rate import azure, figures, policies

STUDIES = (figures.STUDY, azure.STUDY, policies.STUDY)
