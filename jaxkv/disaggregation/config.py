"""Configuration of a router."""

import dataclasses

from jaxkv import validation

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Timeouts and bounds of a router."""

    heartbeat_s: float = 10.0
    """Seconds without an answer to a poll after which a worker is lost; above the 1 s
    that a poll takes. Seconds in which the router's own process stalled do not count.
    """
    start_timeout_s: float = 300.0
    """Seconds within which a worker must load its model."""
    max_attempts: int = 5
    """Attempts after which a request fails, at least 1."""
    backoff_s: float = 0.05
    """Seconds before the second attempt; doubled before each further one."""
    max_restarts: int = 3
    """Consecutive failed starts after which a worker is not replaced any more, at least
    0."""
    max_requests: int = 4096
    """Largest number of requests that are not complete."""
    deadline_s: float | None = None
    """Time limit in s of requests without their own; None for no limit."""
    discover_s: float = 2.0
    """Seconds between searches for workers of other routers."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a field is out of its range.
        """
        validation.above(self, "start_timeout_s", "backoff_s", "discover_s")
        validation.within(self, "heartbeat_s", low=2, high=3600)
        validation.at_least(self, "max_attempts", "max_requests")
        validation.at_least(self, "max_restarts", low=0)
