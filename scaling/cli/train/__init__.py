"""The commands `jaxkv train` and `jaxkv sweep`."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.cli.train.command import find_config

__all__, __getattr__, __dir__ = lazy_exports(__name__)
