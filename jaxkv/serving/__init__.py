"""The facade: `Engine` answers prompts, given as text or token ids."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.serving.compiling.compilation_cache import (
        MIN_COMPILE_TIME_S,
        compile_once,
        usable_folder,
        without_program_cache,
    )
    from jaxkv.serving.compiling.programs import LOCAL
    from jaxkv.serving.engine import Engine
    from jaxkv.serving.host_swap import HostSpace
    from jaxkv.serving.loading import check_free_memory, read_model_folder
    from jaxkv.serving.outputs import Completion, Event, FinishedAnswer
    from jaxkv.serving.request_batch import make_requests
    from jaxkv.serving.requests import RequestRecord
    from jaxkv.serving.step_loop import DispatchedCall

__all__, __getattr__, __dir__ = lazy_exports(__name__)
