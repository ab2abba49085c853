"""How much load does paged memory let a GPU serve before latencies grow?

The serving experiments of the paged-attention paper, in simulated time: the scheduler
is the engine's own, lengths follow the printed means, and a model of a step's time
takes the place of the GPUs. And two recorded hours of a cloud's requests, replayed.
"""

from experiments.serving.latency_vs_rate import azure, figures

STUDIES = (figures, azure)
