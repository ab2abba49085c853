"""Times and bounds of a router."""

import dataclasses

from jaxkv import validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Times and bounds of a router."""

    heartbeat_s: float = 10.0
    """Seconds without an answer to a poll after which a worker counts as lost, above
    the second that a poll takes."""
    start_timeout_s: float = 300.0
    """Seconds that a worker may take to load its model."""
    max_attempts: int = 5
    """Attempts at a request before it fails, at least 1."""
    backoff_s: float = 0.05
    """Seconds before the second attempt; doubled before each further one."""
    max_restarts: int = 3
    """Failed starts in a row after which a worker is given up, at least 0."""
    max_requests: int = 4096
    """Requests that are not complete, at most."""
    deadline_s: float | None = None
    """Deadline of requests that bring none, in seconds; None for no deadline."""
    discover_s: float = 2.0
    """Seconds between looks for workers that other routers started."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a field is out of its range.
        """
        validation.above(self, "start_timeout_s", "backoff_s", "discover_s")
        validation.within(self, "heartbeat_s", low=2, high=3600)
        validation.at_least(self, "max_attempts", "max_requests")
        validation.at_least(self, "max_restarts", low=0)
