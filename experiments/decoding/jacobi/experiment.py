"""Can autoregression be overcome? In how many iterations is a block of tokens found?

One study asks the bundled model as it is, the other trains it for it (CLLM).
"""

from experiments.decoding.jacobi import fine_tuning, from_text

STUDIES = (from_text, fine_tuning)
