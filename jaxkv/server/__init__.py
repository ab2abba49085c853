"""HTTP server: an engine for asyncio code, and OpenAI's API."""

from jaxkv.server.async_engine import SWITCH_S, AsyncEngine
from jaxkv.server.backend import Backend, OverloadedError

__all__ = [
    "SWITCH_S",
    "AsyncEngine",
    "Backend",
    "OverloadedError",
    "app",
    "backend",
    "http_server",
]
