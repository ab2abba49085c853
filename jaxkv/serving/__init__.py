"""The facade: `Engine` answers prompts, given as text or token ids."""

from jaxkv.serving.engine import Engine
from jaxkv.serving.outputs import Completion, Event
from jaxkv.serving.request_batch import make_requests

__all__ = [
    "Completion",
    "Engine",
    "Event",
    "core",
    "engine",
    "host_swap",
    "loading",
    "make_requests",
    "outputs",
    "programs",
    "request_batch",
]
