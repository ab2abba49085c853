"""Measures the K and V memory that sequences with a common prefix share.

One study serves real text with a real model and reads the page tables in the middle of
every step. The other counts pages in simulated time, at the paper's lengths.

Saved pages are 1 - pages in use / pages without sharing, both summed over steps.
"""

from experiments.serving.sharing import measurement, simulation

STUDIES = (measurement.STUDY, simulation.STUDY)
