"""Configuration of a router."""

from typing import Annotated

from jaxkv.validation import (
    ConfigRecord,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
)

CLUSTER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    # An invalid port opens none; the default is 44217 on all interfaces, without the
    # token.
    "AUTOSCALER_METRIC_PORT": "-1",
}
"""Environment variables of a process that starts a Ray cluster, before Ray is imported:
Ray reports no usage, and opens no port for metrics."""


class RouterConfig(ConfigRecord):
    """Timeouts and bounds of a router."""

    heartbeat_s: Annotated[float, Range(2, 3600)] = 10.0
    """Seconds without an answer to a poll after which a worker is lost; above the 1 s
    that a poll takes. Seconds in which the router's own process stalled do not count.
    """
    start_timeout_s: PositiveFloat = 300.0
    """Seconds within which a worker must load its model."""
    max_attempts: PositiveInt = 5
    """Attempts after which a request fails, at least 1."""
    backoff_s: PositiveFloat = 0.05
    """Seconds before the second attempt; doubled before each further one."""
    max_restarts: NonNegativeInt = 3
    """Consecutive failed starts after which a worker is not replaced any more, at least
    0."""
    max_requests: PositiveInt = 4096
    """Largest number of requests that are not complete."""
    deadline_s: float | None = None
    """Time limit in s of requests without their own; None for no limit."""
    discover_s: PositiveFloat = 2.0
    """Seconds between searches for workers of other routers."""
