"""What does it cost that keys and values lie in pages, and how large should pages be?

One study times attention over pages, and over contiguous memory. The other serves whole
workloads in simulated time: there a step takes as long whatever the pages, and what
they leave unused is felt.
"""

from experiments.serving.page_size import attention, serving

STUDIES = (attention, serving)
