"""Claims of the experiments, judged against published numbers, and their registry."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from experiments.framework.claims import MeasuredValue, claims_file, measured
    from experiments.framework.registry import entries, find_entry, load_experiment

__all__, __getattr__, __dir__ = lazy_exports(__name__)
