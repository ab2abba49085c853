"""How much load does paged memory let a GPU serve before latencies grow?

The serving experiments of the paged-attention paper, in simulated time: the scheduler
is the engine's own, lengths follow the printed means, and a model of a step's time
takes the place of the GPUs. Two recorded hours of a cloud's requests are replayed, one
of them under policies that see priorities, deadlines, sessions and predicted lengths.
"""

from experiments.serving.latency_vs_rate import azure, figures, policies

STUDIES = (figures, azure, policies)
