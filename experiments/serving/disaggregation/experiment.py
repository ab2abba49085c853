"""Measures the benefit of disaggregated prefill and decode.

One study simulates the experiments of DistServe with its published step times. The
other serves the same requests on this machine, with workers that run both phases and
with workers that run one phase each, and compares both with the simulator.
"""

from experiments.serving.disaggregation import measurement, simulation

STUDIES = (simulation.STUDY, measurement.STUDY)
