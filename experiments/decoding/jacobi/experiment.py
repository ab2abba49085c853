"""Measures Jacobi decoding: iterations per block and speed of the engine's drafter.

One study uses the bundled model as it is, the other fine-tunes it (CLLM).
"""

from experiments.decoding.jacobi import fine_tuning, from_text

STUDIES = (from_text.STUDY, fine_tuning.STUDY)
