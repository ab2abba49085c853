"""The facade: texts in, answers out, over the engine's pure state."""

from jaxkv.serving.engine import Engine as Engine
from jaxkv.serving.outputs import Completion as Completion
from jaxkv.serving.outputs import Event as Event
from jaxkv.serving.outputs import make_requests as make_requests

__all__ = [
    "Completion",
    "Engine",
    "Event",
    "engine",
    "host_swap",
    "make_requests",
    "outputs",
]
