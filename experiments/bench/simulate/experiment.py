"""Times the simulator, and compares it with other simulators of servers.

One study counts scheduler steps per second. The other predicts load stages of vLLM
servers, with jaxkv and with the installed peers.
"""

from experiments.bench.simulate import scheduler_steps, server_stages

STUDIES = (scheduler_steps.STUDY, server_stages.STUDY)
