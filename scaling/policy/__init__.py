"""Policy optimisation from rewards that a program checks, as a pure function."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.policy.loop import (
        SMALL_POLICY,
        PolicyConfig,
        PolicyInfo,
        PolicyState,
        ordinary_logprobs,
        policy_step,
        reward_rollout,
        run_policy,
        start_policy,
        trainer_logprobs,
    )
    from scaling.policy.losses import (
        PolicyLoss,
        PolicyObjective,
        group_advantages,
        k1,
        k3,
        pass_at_k,
        policy_loss,
    )
    from scaling.policy.pretraining import pretrain
    from scaling.policy.rollouts import Rollout, roll_out
    from scaling.policy.tasks import TASKS, Answers, Prompts, Task, find_task

__all__, __getattr__, __dir__ = lazy_exports(__name__)
