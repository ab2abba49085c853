"""Compiler options of the tests: fast compilation, or the default on request.

Workers of a test run inherit environment variables, so that a wrong order of set-up
gives every file the fast options.
"""

import jax
import pytest
from jax._src import compiler


def xla_cpu_options() -> tuple[int, bool]:
    """Returns XLA's optimisation level on CPUs, and True if it uses older emitters."""
    backend = jax.devices()[0].client
    options = compiler.get_compile_options(1, 1, backend=backend)
    level = (
        options.executable_build_options.debug_options.xla_backend_optimization_level
    )
    return level, b"xla_cpu_disable_new_fusion_emitters" in options.SerializeAsString()


def test_programs_compile_without_optimisation() -> None:
    assert xla_cpu_options() == (0, True)


@pytest.mark.usefixtures("full_optimization")
def test_files_can_request_default_optimisation() -> None:
    assert xla_cpu_options() == (3, False)
