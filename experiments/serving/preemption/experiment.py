"""What does it cost when requests are preempted, and what makes it cheap?

More requests run than the pool has pages for once they have grown. Then some are
preempted: their pages are released and their tokens computed again, or the pages are
moved to a buffer beside the pool, and from there to host memory, and come back. One
study serves a real model in too little memory; the other, `paper`, simulates OPT-13B's
chat requests. The recomputed share is tokens computed again / tokens computed.
"""

from experiments.serving.preemption import measurement, simulation

STUDIES = (measurement, simulation)
