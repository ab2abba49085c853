"""Runs of policy optimisation, with the seeds mapped in one program."""

import dataclasses
import functools
import io
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Float

from experiments import lab
from jaxkv.models import Params
from scaling.policy import (
    TASKS,
    PolicyConfig,
    PolicyInfo,
    PolicyState,
    pretrain,
    run_policy,
    start_policy,
)

EXACT = "none"
"""Name of the setting without mismatch."""


def _by_answer(policy: PolicyConfig) -> PolicyConfig:
    objective = dataclasses.replace(
        policy.objective, level="sequence", ratio="sequence"
    )
    return dataclasses.replace(policy, updates_per_rollout=8, objective=objective)


MISMATCHES: dict[str, Callable[[PolicyConfig], PolicyConfig]] = {
    EXACT: lambda policy: policy,
    "fast numerics": functools.partial(dataclasses.replace, numerics="fast"),
    "parameters 3 %": functools.partial(dataclasses.replace, mismatch=0.03),
    "parameters 10 %": functools.partial(dataclasses.replace, mismatch=0.1),
    "10 %, ratio to trainer": functools.partial(
        dataclasses.replace, mismatch=0.1, ratio_to="trainer"
    ),
    "reported log p 0.5": functools.partial(dataclasses.replace, logprob_noise=0.5),
    "4 updates a rollout": functools.partial(
        dataclasses.replace, updates_per_rollout=4
    ),
    "8 updates a rollout": functools.partial(
        dataclasses.replace, updates_per_rollout=8
    ),
    "8 updates, by answer": _by_answer,
}
"""Differences between sampler and trainer by name, as changes of a config: numerics, a
relative error of the sampler's parameters, an error of its reported log-probabilities,
and parameters that are up to 7 updates old."""


class Config(lab.ConfigRecord):
    """Policy, tasks and lengths of the runs."""

    tasks: Annotated[tuple[str, ...], lab.Choices(TASKS, 1)] = ("copying", "brackets")
    """Tasks that are learned without mismatch."""
    mismatches: Annotated[tuple[str, ...], lab.Choices(MISMATCHES)] = (*MISMATCHES,)
    """Settings that are compared on the first task."""
    policy: PolicyConfig = PolicyConfig(num_prompts=24)
    """Rollouts, updates and objective; the task is replaced."""
    num_pretraining: lab.PositiveInt = 3000
    """Steps of pretraining on demonstrations of all tasks."""
    error_rate: lab.Share = 0.3
    """Share of the demonstrations' tokens that are replaced by random ones."""
    num_seeds: Annotated[int, lab.Range(2)] = 8
    """Seeds of prompts, draws and errors. All start from one pretrained policy."""
    num_rollouts: lab.PositiveInt = 200
    """Rollouts of each task."""
    num_compared: lab.PositiveInt = 50
    """Rollouts of each mismatch."""
    num_call: lab.PositiveInt = 10
    """Rollouts of a call, which is one scan."""
    seed: lab.NonNegativeInt = 0
    """Seed of the pretrained policy."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for name in ("num_rollouts", "num_compared"):
            if getattr(self, name) % self.num_call:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of "
                    f"num_call={self.num_call}"
                )
        if self.num_compared > self.num_rollouts:
            raise ValueError(
                f"num_compared={self.num_compared} must be at most "
                f"num_rollouts={self.num_rollouts}"
            )
        lab.Range(2 * self.num_call).check("num_rollouts", self.num_rollouts)


class SeedRuns(NamedTuple):
    """Runs of all seeds with one config.

    Attributes:
      info: measurements, with axes of seeds and rollouts.
      seconds: time of all seeds for each call, without compilation.
    """

    info: PolicyInfo
    seconds: Float[np.ndarray, " calls"]

    @property
    def tokens_per_s(self) -> Float[np.ndarray, " calls"]:
        """Tokens that are sampled and trained on per second."""
        tokens = np.asarray(self.info.num_tokens).sum(axis=0)
        return tokens.reshape(len(self.seconds), -1).sum(axis=1) / self.seconds

    def first(self, num_calls: int) -> "SeedRuns":
        """Returns the first calls."""
        num = self.info.reward.shape[1] // len(self.seconds) * num_calls
        info = jax.tree.map(lambda x: x[:, :num], self.info)
        return SeedRuns(info, self.seconds[:num_calls])


class SeedCheck(lab.ResultRecord):
    """Two calls of each seed alone, against all seeds in one program."""

    num_leaves: int = lab.column("arrays of a state", heading="arrays")
    num_bytes: int = lab.column("bytes of the states of all seeds", heading="bytes")
    num_different: int = lab.column("bytes that differ", heading="different bytes")
    single_s: float = lab.column("time of all seeds, one program each", heading="alone")
    mapped_s: float = lab.column("time of all seeds in one program", heading="mapped")


def pretrain_policy(config: Config) -> tuple[Params, float, float]:
    """Returns the policy at the start, its loss, and the seconds."""
    begin = time.monotonic()
    run = functools.partial(
        pretrain,
        config.seed,
        config.num_pretraining,
        model=config.policy.model,
        error_rate=config.error_rate,
    )
    params, loss = jax.jit(run)()
    return params, float(loss), time.monotonic() - begin


def start_seeds(params: Params, num_seeds: int) -> PolicyState:
    """Returns the states of all seeds before the first update."""
    states = [start_policy(params, seed) for seed in range(num_seeds)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def compile_seeds(
    states: PolicyState, policy: PolicyConfig, num_call: int
) -> jax.stages.Compiled:
    """Compiles a call for all seeds, one after the other in one program."""

    def run(states: PolicyState) -> tuple[PolicyState, PolicyInfo]:
        return lax.map(lambda state: run_policy(state, policy, num_call), states)

    return jax.jit(run).lower(states).compile()


def run_seeds(
    params: Params,
    policy: PolicyConfig,
    config: Config,
    num_rollouts: int,
    report: Callable[[PolicyInfo], bool],
) -> SeedRuns | None:
    """Runs all seeds.

    Args:
      params: policy at the start.
      policy: config of the runs.
      config: seeds and calls.
      num_rollouts: rollouts of each seed.
      report: called with the measurements of each call; True stops the runs.

    Returns:
      The measurements; None if stopped.
    """
    states = start_seeds(params, config.num_seeds)
    program = compile_seeds(states, policy, config.num_call)
    infos: list[PolicyInfo] = []
    seconds: list[float] = []
    for _ in range(num_rollouts // config.num_call):
        begin = time.monotonic()
        states, info = jax.block_until_ready(program(states))
        seconds.append(time.monotonic() - begin)
        infos.append(jax.tree.map(np.asarray, info))
        if report(infos[-1]):
            return None
    info = jax.tree.map(lambda *parts: np.concatenate(parts, 1), *infos)
    return SeedRuns(info, np.array(seconds))


def compare_seeds(params: Params, policy: PolicyConfig, config: Config) -> SeedCheck:
    """Runs two calls of each seed alone, and of all seeds mapped.

    The state of a seed alone is saved and read again between its calls.
    """

    def run(state: PolicyState) -> tuple[PolicyState, PolicyInfo]:
        return run_policy(state, policy, config.num_call)

    mapped = start_seeds(params, config.num_seeds)
    program = compile_seeds(mapped, policy, config.num_call)
    begin = time.monotonic()
    for _ in range(2):
        mapped, _ = jax.block_until_ready(program(mapped))
    mapped_s = time.monotonic() - begin
    single = jax.jit(run).lower(start_policy(params, 0)).compile()
    num_bytes = 0
    num_different = 0
    single_s = 0.0
    for seed in range(config.num_seeds):
        state = start_policy(params, seed)
        for _ in range(2):
            begin = time.monotonic()
            state, _ = jax.block_until_ready(single(state))
            single_s += time.monotonic() - begin
            state = _saved_and_read(state)
        for alone, together in zip(*map(jax.tree.leaves, (state, mapped)), strict=True):
            one, other = (
                np.frombuffer(np.asarray(leaf).tobytes(), np.uint8)
                for leaf in (alone, together[seed])
            )
            num_bytes += one.size
            num_different += int(np.sum(one != other))
    num_leaves = len(jax.tree.leaves(mapped))
    return SeedCheck(num_leaves, num_bytes, num_different, single_s, mapped_s)


def _saved_and_read(state: PolicyState) -> PolicyState:
    leaves, tree = jax.tree.flatten(state)
    file = io.BytesIO()
    np.savez(file, *map(np.asarray, leaves))
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return jax.tree.unflatten(tree, [arrays[name] for name in arrays.files])
