"""What does speculative decoding buy, and when does it not pay?

One study has a real model continue real text. The other gives drafts a chance of being
accepted, on a shape that is large enough for a step to cost what its weights cost, and
holds speeds against the formula and the measured cost of verifying.
"""

from experiments.decoding.speculation import on_text, synthetic

STUDIES = (on_text, synthetic)
