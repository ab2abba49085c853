"""The command `jaxkv calibrate`: a server's step times, fitted to measured runs."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.cli.calibrate.server_report import report_server_table

__all__, __getattr__, __dir__ = lazy_exports(__name__)
