"""Programs of an engine: what is compiled, when, and where compiled ones are kept."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.serving.compiling.compilation_cache import (
        MAX_CACHE_BYTES,
        MIN_COMPILE_TIME_S,
        compile_once,
        keep_programs,
        notify_if_slow,
        usable_folder,
        without_program_cache,
    )
    from jaxkv.serving.compiling.engine_programs import EnginePrograms
    from jaxkv.serving.compiling.programs import (
        LOCAL,
        Programs,
        make_state,
        select_programs,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
