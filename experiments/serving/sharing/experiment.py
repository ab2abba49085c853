"""How much K and V memory do sequences with a common beginning share?

One study has a real model continue real text, and looks at the page tables in the
middle of every step. The other counts pages in simulated time, at the paper's lengths.

Saved pages are 1 - pages in use / pages that every sequence would hold for itself, both
summed over steps.
"""

from experiments.serving.sharing import measurement, simulation

STUDIES = (measurement, simulation)
