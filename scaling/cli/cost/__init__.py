"""The command `jaxkv cost`."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.cli.cost.command import find_description, list_models

__all__, __getattr__, __dir__ = lazy_exports(__name__)
