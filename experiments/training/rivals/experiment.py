"""Does the transformer win over its rivals, and at what compute to equal loss?

LSTM against transformer, SGD against Adam, one, four and six layers against two,
learned against rotary positions: all at equal parameters outside embeddings, on the
same text in the same order, with as many learning rates tried on each side at every
size and as many seeds. Each side is a curve through the best of its runs by compute, so
the verdict is a ratio of compute with its interval, not the outcome of two runs.
"""

from experiments.framework import Study
from experiments.training.rivals import report, runs, settings

STUDIES = (
    Study(
        configs=settings.CONFIGS,
        result=runs.Result,
        run=runs.run,
        plot=report.plot,
        claims=report.claims,
        metrics=report.metrics,
        summary=report.summary,
        panels=(2, 2),
    ),
)
