"""`jaxkv fit LOG --law downstream`, and `--law hyperparameters`."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.cli.forecasts.command import (
        downstream_experiment,
        hyperparameter_experiment,
    )
    from scaling.cli.forecasts.config import (
        DOWNSTREAM,
        HYPERPARAMETERS,
        DownstreamConfig,
        HyperparameterConfig,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
