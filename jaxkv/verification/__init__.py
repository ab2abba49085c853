"""Tests of a policy by random loads: engine and simulator compared step for step."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.verification.chain_checks import (
        ChainReplay,
        check_chains,
        draw_chains,
        replay_chains,
    )
    from jaxkv.verification.engine_replay import (
        EngineReplay,
        engine_requests,
        find_difference,
        replay_in_engine,
    )
    from jaxkv.verification.loads import RandomLoad, draw_random_load
    from jaxkv.verification.policy_checks import (
        POLICY_CHECKS,
        PolicyFault,
        PolicyReport,
        verify_policy,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
