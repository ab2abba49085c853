"""What does it buy to read prompts on other GPUs than those that decode?

One study simulates the experiments of DistServe, with the times of steps that its
authors published. The other serves the same requests by processes that do both phases
and by processes of either phase, on this machine, and asks the simulator what it would
have said.
"""

from experiments.serving.disaggregation import measurement, simulation

STUDIES = (simulation, measurement)
