"""`jaxkv fit`."""

from experiments.cli.fit.outcomes import Result as Result

__all__ = ["Result", "command", "drawing", "fitting", "grids", "report"]
