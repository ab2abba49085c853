"""Disaggregated serving: prefill workers, decode workers, and KV transfer between them.

`Service` starts a service on one machine or joins a Ray cluster; it needs the extra
`ray`. `Router` and `Worker` are its parts, without Ray.
"""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.disaggregation.choice import Candidate, least_work, prefix_affinity
    from jaxkv.disaggregation.config import CLUSTER_ENVIRONMENT, RouterConfig
    from jaxkv.disaggregation.process import HttpFront
    from jaxkv.disaggregation.router import (
        ReplayError,
        RequestCancelledError,
        RoutedAnswer,
        Router,
        Transfer,
    )
    from jaxkv.disaggregation.service import Service, ServiceLostError
    from jaxkv.disaggregation.worker import Worker, WorkerSpec
    from jaxkv.disaggregation.worker_pool import WorkerLostError

__all__, __getattr__, __dir__ = lazy_exports(__name__)
