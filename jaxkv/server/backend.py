"""Interface between the HTTP application and the system that serves a model."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes
from jaxkv.serving import Event


class OverloadedError(RuntimeError):
    """There is no room for another request now; a retry may succeed."""


@runtime_checkable
class Backend(Protocol):
    """Serves one model to asyncio code: an engine, or a router of several.

    The application calls it from one event loop.
    """

    @property
    def model_name(self) -> str:
        """Name of the model, as /v1/models lists it."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the adapters, each a model of its own for clients."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model, as `Engine` takes it; None without text."""
        ...

    @property
    def max_length(self) -> int:
        """Largest number of tokens of prompt and answer."""
        ...

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        key_id: int | None = None,
        attributes: RequestAttributes | None = None,
        deadline_s: float | None = None,
    ) -> AsyncIterator[Event]:
        """Answers a prompt.

        Closing the iterator early, or cancelling the task that waits for it, cancels
        the request.

        Args:
          prompt: text, or token ids.
          sampling: sampling parameters.
          key_id: number in [0, 2**31) that keys the samples if `sampling.seed` is None;
            None takes a number of the backend's own. The same number gives the same
            tokens.
          attributes: attributes for the scheduling policy; None means the defaults.
          deadline_s: time limit in s from now, above 0; None means no limit.

        Yields:
          Events; the last one has the completion. Their `request_id` is the backend's.

        Raises:
          ValueError: the request cannot be served; raised before the first event.
          TimeoutError: the deadline has passed.
          OverloadedError: there is no room now; raised before the first event.
          StallError: the scheduling policy never serves the request; the backend
            continues with other requests.
          RuntimeError: the backend has failed or is closed.
        """
        ...

    def status(self) -> dict[str, object]:
        """Returns counts for monitoring, as plain JSON values.

        "running" (requests that are not complete) and "is_ready" are always present.
        Numbers and booleans at the top level become metrics.
        """
        ...
