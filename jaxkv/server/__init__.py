"""HTTP server: an engine for asyncio code, and OpenAI's API."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.server.app import HttpService, make_app
    from jaxkv.server.async_engine import SWITCH_S, AsyncEngine
    from jaxkv.server.backend import Backend, OverloadedError
    from jaxkv.server.http_server import listen, serve, url_of
    from jaxkv.server.incident_recorder import IncidentRecorder, ModelOrigin
    from jaxkv.server.incident_replay import (
        IncidentEngine,
        ReplayAgreement,
        ReplayTable,
    )
    from jaxkv.server.incidents import (
        Incident,
        IncidentObjectives,
        JsonObject,
        model_digests,
        read_incident,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
