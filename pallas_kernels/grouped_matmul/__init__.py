"""Product of rows with the weights of their group, for mixtures of experts."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pallas_kernels.grouped_matmul.api import (
        GroupedImplementation,
        choose_grouped_matmul,
        grouped_matmul,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
