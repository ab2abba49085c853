"""Workers as Ray actors: the only file of the package that imports Ray.

Actors are named and detached, so that routers in several processes share them. Ray
retries no call (`max_restarts=0`, `max_task_retries=0`): the router does.
"""

import contextlib
import logging
import os
from collections.abc import Generator, Mapping
from typing import Any

import ray
import ray.actor
import ray.exceptions
from ray import cloudpickle
from ray.util import list_named_actors

from jaxkv.disaggregation.config import CLUSTER_ENVIRONMENT
from jaxkv.disaggregation.worker import (
    Attempt,
    PrefillResult,
    Report,
    Worker,
    WorkerSpec,
)
from jaxkv.disaggregation.worker_pool import Launcher, WorkerHandle
from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes

MAX_CONCURRENCY = 10_000
"""Largest number of concurrent calls of an actor."""
RECONNECT_S = 10
"""Seconds after which a process considers a head node lost; Ray's default is 60."""
HEALTH_CHECK = {"health_check_period_ms": 1000, "health_check_failure_threshold": 10}
"""A node that stopped is considered lost after 10 s; Ray's default is 65 s."""
OBJECT_STORE_BYTES = 200 * 2**20
"""Shared memory of an embedded node, through which pages pass."""


def environment(token: str | None) -> dict[str, str]:
    """Returns the environment variables of a process that will call `connected`.

    Args:
      token: Ray's token; None leaves the variables `RAY_AUTH_TOKEN` and
        `RAY_AUTH_TOKEN_PATH` unchanged, for a cluster that has one.
    """
    environ = CLUSTER_ENVIRONMENT | {
        "RAY_AUTH_MODE": "token",
        # Workers without a GPU keep the variables that JAX reads.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        "RAY_worker_niceness": "0",  # 15 by default
    }
    return environ if token is None else environ | {"RAY_AUTH_TOKEN": token}


class RayHandle:
    """Calls to one actor. Implements `worker_pool.WorkerHandle`."""

    def __init__(self, actor: Any):
        self.actor = actor

    async def describe(self) -> dict[str, Any]:
        """See `Worker.describe`."""
        return await _result(self.actor.describe.remote())

    async def poll(self, router: str) -> list[Report] | None:
        """See `Worker.poll`."""
        return await _result(self.actor.poll.remote(router))

    async def submit(
        self,
        attempt: Attempt,
        prompt: list[int],
        sampling: Sampling,
        key_id: int,
        attributes: RequestAttributes | None = None,
    ) -> None:
        """See `Worker.submit`."""
        fields = attempt, prompt, sampling, key_id, attributes
        await _result(self.actor.submit.remote(*fields))

    async def prefill(
        self,
        attempt: Attempt,
        tokens: list[int],
        salt: int,
        attributes: RequestAttributes | None = None,
    ) -> tuple[PrefillResult, Any]:
        """See `Worker.prefill`; the pages stay with the worker until `bring`."""
        # Separate values, so that Ray copies the payload once and without pickling.
        call = self.actor.prefill.options(num_returns=3)
        done, header, payload = call.remote(attempt, tokens, salt, attributes)
        return await _result(done), (header, payload)

    async def bring(self, pages: Any) -> int:
        """See `Worker.bring`; the pages are sent from worker to worker."""
        return await _result(self.actor.bring.remote(*pages))

    def cancel(self, attempt: Attempt) -> None:
        """See `Worker.cancel`; does not wait."""
        with contextlib.suppress(ray.exceptions.RayError):
            self.actor.cancel.remote(attempt)

    async def release(self, router: str) -> bool:
        """See `Worker.release`."""
        return await _result(self.actor.release.remote(router))


class RayLauncher:
    """Starts workers of one service as actors. Implements `worker_pool.Launcher`.

    Args:
      service: name of the service; routers of the same name share workers.
    """

    def __init__(self, service: str):
        self._service = service
        self._actor = ray.remote(Worker)

    def start(self, name: str, spec: WorkerSpec) -> WorkerHandle:
        """See `worker_pool.Launcher`."""
        actor = self._actor.options(
            name=name,
            namespace=self._service,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=spec.num_gpus,
            resources=dict(spec.resources),
            scheduling_strategy="SPREAD",
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=MAX_CONCURRENCY,
        ).remote(name, spec)
        return RayHandle(actor)

    def find(self) -> Mapping[str, WorkerHandle]:
        """See `worker_pool.Launcher`."""
        handles = {}
        for named in list_named_actors(all_namespaces=True):
            if named["namespace"] == self._service:
                with contextlib.suppress(ValueError):  # the actor has just ended
                    actor = ray.get_actor(named["name"], namespace=self._service)
                    handles[named["name"]] = RayHandle(actor)
        return handles

    def kill(self, name: str, handle: WorkerHandle) -> None:
        """See `worker_pool.Launcher`."""
        assert isinstance(handle, RayHandle)
        ray.kill(handle.actor)


@contextlib.contextmanager
def connected(address: str | None, service: str, *, folder: str) -> Generator[Launcher]:
    """Connects this process to a cluster, or starts one that ends with it.

    The variables of `environment` must be set before this module is imported.

    Args:
      address: "HOST:PORT" of the cluster's head; None starts a cluster on this machine.
      service: name of the service.
      folder: folder for logs and sockets of an embedded cluster, at most 40 characters.

    Raises:
      ConnectionError: the cluster cannot be reached.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {}
    if address is None:
        options = {
            "num_cpus": os.cpu_count(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": folder,
            "_system_config": HEALTH_CHECK,
        }
    try:
        ray.init(
            address="local" if address is None else address,
            namespace=service,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (ConnectionError, RuntimeError, OSError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ConnectionError(
            f"address={address!r} cannot be reached: {line}"
        ) from None
    try:
        yield RayLauncher(service)
    finally:
        ray.shutdown()


dumps = cloudpickle.dumps
loads = cloudpickle.loads
"""Pickle and unpickle a function, including one defined in a script or notebook."""


def head_address() -> str:
    """Returns "HOST:PORT" of the head of this process's cluster."""
    return ray.get_runtime_context().gcs_address


async def _result(reference: Any) -> Any:
    """Awaits a call.

    Raises:
      ConnectionError: the worker, or an object passed to it, is lost.
      ValueError: the worker refuses the call.
      RuntimeError: the worker's engine has failed.
    """
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConnectionError | ray.exceptions.RayError):
            raise ConnectionError(_line(cause)) from None
        if isinstance(cause, ValueError | RuntimeError):
            raise type(cause)(str(cause)) from None
        raise RuntimeError(f"{type(cause).__name__}: {_line(cause)}") from None
    except ray.exceptions.ActorDiedError:
        raise ConnectionError("its process has ended") from None
    except ray.exceptions.RayError as error:
        raise ConnectionError(_line(error)) from None


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
