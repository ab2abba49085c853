"""How the suite compiles: fast, and as users have it where a file asks for that.

Workers of a test run inherit variables, which once made every program a fast one.
"""

import jax
import pytest
from jax._src import compiler


def options() -> tuple[int, bool]:
    """XLA's level of optimisation for CPUs, and whether it takes its older emitters."""
    backend = jax.devices()[0].client
    found = compiler.get_compile_options(1, 1, backend=backend)
    level = found.executable_build_options.debug_options.xla_backend_optimization_level
    return level, b"xla_cpu_disable_new_fusion_emitters" in found.SerializeAsString()


def test_programs_are_compiled_fast() -> None:
    assert options() == (0, True)


@pytest.mark.usefixtures("compiled_as_served")
def test_a_file_that_asks_has_programs_as_users_have_them() -> None:
    assert options() == (3, False)
