"""Measures the speed-up of speculative decoding.

One study continues real text with a real model. The other sets the acceptance rate of
drafts, on a shape that is large enough for weights to dominate the cost of a step, and
compares speeds with the formula and the measured cost of verification.
"""

from experiments.decoding.speculation import on_text, synthetic

STUDIES = (on_text.STUDY, synthetic.STUDY)
