"""The command `jaxkv simulate`."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.cli.simulate.options import parse_objectives

__all__, __getattr__, __dir__ = lazy_exports(__name__)
