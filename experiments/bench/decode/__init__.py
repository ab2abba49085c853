"""Our engine beside others."""

__all__ = [
    "jaxkv_engine",
    "timeline",
]
