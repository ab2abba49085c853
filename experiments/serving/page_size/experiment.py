"""Measures the cost of paged memory and the best page size.

One study times attention over pages and over contiguous memory. The other simulates
whole workloads, where the time of a step does not depend on the page size, and pages
differ only in their unused places.
"""

from experiments.serving.page_size import attention, serving

STUDIES = (attention.STUDY, serving.STUDY)
