"""Measures the cost of preemption: recomputation and swapping.

More requests run than the page pool holds once they have grown, so some are preempted.
Either their pages are released and their tokens recomputed, or the pages are swapped to
a buffer next to the pool, from there to host memory, and back. One study serves a real
model in too little memory; the other, `paper`, simulates OPT-13B's chat requests. The
recomputed share is recomputed tokens / computed tokens.
"""

from experiments.serving.preemption import measurement, simulation

STUDIES = (measurement.STUDY, simulation.STUDY)
