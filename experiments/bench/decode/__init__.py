"""Our engine beside others."""

__all__ = [
    "ours",
    "timeline",
]
