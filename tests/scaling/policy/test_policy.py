"""Policy optimisation: tasks, losses, and the loop with an engine inside."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.engine import EngineParts
from jaxkv.models import PagedForward, init_params, make_model_pages
from jaxkv.sampling import Sampling
from scaling.policy import (
    TASKS,
    Answers,
    PolicyConfig,
    PolicyObjective,
    Prompts,
    group_advantages,
    loop,
    losses,
    pass_at_k,
    policy_loss,
    policy_step,
    pretrain,
    pretraining,
    roll_out,
    rollouts,
    run_policy,
    start_policy,
    tasks,
)

MODEL = dataclasses.replace(
    PolicyConfig().model, hidden_size=16, num_q_heads=2, head_dim=8, mlp_size=32
)
CONFIG = PolicyConfig(model=MODEL, task="language")


@functools.cache
def params() -> jaxkv.models.Params:
    return init_params(MODEL, jax.random.key(3))


def texts(prompts: Prompts) -> list[str]:
    """Prompts as text, without their last character."""
    pairs = zip(prompts.tokens, prompts.length, strict=True)
    return [tasks.decode(np.asarray(tokens[: n - 1])) for tokens, n in pairs]


def answer(*strings: str, ends: bool = True) -> Answers:
    rows = [tasks.encode(text) for text in strings]
    tokens = np.full((len(rows), tasks.ANSWER_TOKENS), tasks.END, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    length = np.array([len(ids) + ends for ids in rows], np.int32)
    return Answers(jnp.asarray(tokens), jnp.asarray(length))


def right_answer(name: str, prompt: str) -> str:
    """An answer in plain Python; for "language" the shortest of all."""
    if name == "copying":
        return prompt
    if name == "brackets":
        return "".join(")]}"["([{".index(x)] for x in reversed(prompt))
    if name == "sums":
        return f"{sum(map(int, prompt.split('+'))):03d}"
    for num in range(4):
        for letters in itertools.product("ab", repeat=num):
            both = [*prompt, *letters]
            if both.count("a") % 2 == 0 and both.count("b") % 3 == 0:
                return "".join(letters)
    raise AssertionError(prompt)


@pytest.mark.parametrize("name", TASKS)
def test_rewards_equal_those_of_plain_python(name: str) -> None:
    task = TASKS[name]
    prompts = task.draw(jax.random.key(5), 24)
    right = [right_answer(name, text) for text in texts(prompts)]
    assert len({*texts(prompts)}) > 5
    solved = task.solve(prompts)
    assert task.reward(prompts, solved).all()
    assert task.reward(prompts, answer(*right)).all()
    wrong = [text[:-1] + ("d" if text.endswith("c") else "c") for text in right]
    assert not task.reward(prompts, answer(*wrong)).any()
    assert not task.reward(prompts, answer(*right, ends=False)).any()


def test_a_character_outside_of_the_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match="character='z' must be"):
        tasks.encode("abz")


def test_advantages_of_groups() -> None:
    rewards = jnp.array([[1.0, 0, 0, 1], [1, 1, 1, 1]])
    np.testing.assert_allclose(
        group_advantages(rewards), [[1, -1, -1, 1], [0, 0, 0, 0]], rtol=1e-5
    )
    plain = group_advantages(rewards, divides_by_deviation=False)
    np.testing.assert_allclose(plain[0], [0.5, -0.5, -0.5, 0.5])


def reference_loss(
    logprobs: np.ndarray,
    sampled: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    objective: PolicyObjective,
) -> float:
    """The loss token by token."""
    answers = []
    for row in range(len(mask)):
        places = np.flatnonzero(mask[row])
        differences = (logprobs - sampled)[row, places]
        if objective.ratio == "sequence":
            differences[:] = differences.mean()
        values = []
        for difference, place in zip(differences, places, strict=True):
            ratio = math.exp(difference)
            clipped = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
            gain = min(ratio * advantages[row], clipped * advantages[row])
            log_ratio = -logprobs[row, place]  # to a reference of zeros
            k3 = math.exp(log_ratio) - log_ratio - 1
            values.append(gain - objective.kl_weight * k3)
        answers.append(values)
    if objective.level == "token":
        return -float(np.mean([x for values in answers for x in values]))
    return -float(np.mean([np.mean(values) for values in answers]))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_loss_equals_that_of_plain_python(level: Any, ratio: Any) -> None:
    rng = np.random.default_rng(0)
    logprobs, sampled = rng.normal(-1, 0.4, (2, 5, 6)).astype(np.float32)
    advantages = rng.normal(0, 1, 5).astype(np.float32)
    mask = np.arange(6)[None, :] < rng.integers(1, 7, 5)[:, None]
    objective = PolicyObjective(
        level=level, ratio=ratio, kl_weight=0.1, clip_low=0.1, clip_high=0.3
    )
    given = map(jnp.asarray, (logprobs, sampled, logprobs * 0, advantages, mask))
    loss = policy_loss(*given, objective)
    expected = reference_loss(logprobs, sampled, advantages, mask, objective)
    assert float(loss.loss) == pytest.approx(expected, rel=1e-5)
    assert 0 < float(loss.clipped) < 1


def test_divergences_of_two_policies() -> None:
    """The mean of both estimates over draws is the divergence."""
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.4, 0.35, 0.25])
    exact = float(np.sum(p * np.log(p / q)))
    draws = np.random.default_rng(1).choice(3, (1, 200_000), p=p)
    sampler, trainer = (jnp.asarray(np.log(x)[draws], jnp.float32) for x in (p, q))
    mask = jnp.ones(draws.shape, bool)
    for estimate in (losses.k1, losses.k3):
        value = losses.mean_of_tokens(estimate(sampler, trainer, mask), mask)
        assert float(value) == pytest.approx(exact, rel=0.03)
    assert float(losses.k3(sampler, trainer, mask).min()) >= 0


def test_pass_at_k_counts_subsets() -> None:
    for num_right in range(6):
        marks = [True] * num_right + [False] * (5 - num_right)
        for k in (1, 2, 5):
            subsets = [*itertools.combinations(marks, k)]
            share = np.mean([any(subset) for subset in subsets])
            [estimate] = pass_at_k(np.array([num_right]), 5, k)
            assert estimate == pytest.approx(share)
    with pytest.raises(ValueError, match="k=6 must be at most num_samples=5"):
        pass_at_k(np.array([1]), 5, 6)


@pytest.mark.slow
def test_a_rollout_is_that_of_an_engine() -> None:
    prompts = TASKS["language"].draw(jax.random.key(1), 4)
    run = functools.partial(roll_out, model=MODEL, group_size=3)
    rollout = jax.jit(run)(params(), prompts, jnp.array([0, 7], jnp.uint32))
    bounds = rollouts.rollout_bounds(4, 3)
    parts = EngineParts(
        params(),
        PagedForward(MODEL, "reproducible"),
        make_model_pages(MODEL, bounds),
        dataclasses.replace(bounds, seed=7),
        vocab_size=MODEL.vocab_size,
    )
    engine = jaxkv.Engine(parts)
    ask = Sampling(
        n=3, max_tokens=tasks.ANSWER_TOKENS, stop_tokens=(tasks.END,), logprobs=0
    )
    asked = [
        np.asarray(row[:n]).tolist()
        for row, n in zip(prompts.tokens, prompts.length, strict=True)
    ]
    done = engine.generate(asked, ask)
    for index, completion in enumerate(done):
        for sample, given in enumerate(completion.answers):
            row = 3 * index + sample
            begin, end = int(rollout.prompt_length[row]), int(rollout.length[row])
            assert given.tokens == rollout.tokens[row, begin:end].tolist()
            assert given.logprobs == rollout.logprobs[row, begin:end].tolist()


@functools.cache
def jitted_run() -> jax.stages.Wrapped:
    return jax.jit(functools.partial(run_policy, config=CONFIG, num_updates=2))


def test_sampler_and_trainer_agree_in_every_bit() -> None:
    state, info = jitted_run()(start_policy(params(), 0))
    assert int(info.num_tokens.sum()) > 50
    assert int(info.num_different.sum()) == 0
    assert float(jnp.abs(info.k3).max()) == float(info.largest.max()) == 0
    assert int(state.policy.step) == 2
    assert float(info.grad_norm.max()) > 0
    assert info.entropy[0] != info.entropy[1]  # later draws are others


@pytest.mark.slow
def test_a_saved_state_continues_with_the_same_bits() -> None:
    once = jax.jit(functools.partial(policy_step, config=CONFIG))
    state = start_policy(params(), 0)
    for _ in range(2):
        state, _ = once(jax.tree.map(np.asarray, state))
    together, _ = jitted_run()(start_policy(params(), 0))
    for one, other in zip(*map(jax.tree.leaves, (state, together)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.usefixtures("full_optimization")  # bits of two programs
def test_seeds_in_one_program_are_single_runs() -> None:
    starts = jax.tree.map(
        lambda *x: jnp.stack(x), *[start_policy(params(), seed) for seed in range(3)]
    )
    together, infos = jax.jit(
        lambda starts: jax.lax.map(
            lambda state: run_policy(state, CONFIG, num_updates=2), starts
        )
    )(starts)
    for seed in range(3):
        alone = jitted_run()(start_policy(params(), seed))
        mapped = jax.tree.map(lambda x, seed=seed: x[seed], (together, infos))
        for one, other in zip(*map(jax.tree.leaves, (alone, mapped)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "policy"),
    [
        ("mismatch", "sampler"),
        ("logprob_noise", "sampler"),
        ("mismatch", "trainer"),
    ],
)
def test_a_mismatch_is_measured(error: str, policy: str) -> None:
    """Ratios to a sampler with errors are clipped, those to the trainer are 1."""
    objective = PolicyObjective(clip_low=1e-3, clip_high=1e-3)
    config = dataclasses.replace(
        CONFIG, objective=objective, ratio_to=policy, **{error: 0.05}
    )
    _, info = jax.jit(functools.partial(policy_step, config=config))(
        start_policy(params(), 0)
    )
    assert int(info.num_different) > 0.9 * int(info.num_tokens)
    assert float(info.k3) > 0
    assert (float(info.clipped) > 0) == (policy == "sampler")


def test_demonstrations_have_errors_at_the_rate() -> None:
    right = pretraining.demonstrations(jax.random.key(2), 64, 0.0)
    wrong = pretraining.demonstrations(jax.random.key(2), 64, 0.3)
    for index, task in enumerate(TASKS.values()):
        rows = slice(16 * index, 16 * (index + 1))
        one = jax.tree.map(lambda x, rows=rows: x[rows], right)
        assert loop.reward_rollout(task, one).all()
    assert (right.length == wrong.length).all()
    share = np.mean((right.tokens != wrong.tokens)[right.mask])
    assert 0.2 < share < 0.4
    assert (right.tokens == wrong.tokens)[~right.mask].all()


@pytest.mark.slow
def test_pretraining_lowers_the_loss() -> None:
    _, first = pretrain(0, 1, model=MODEL, batch_size=32, error_rate=0.0)
    _, last = pretrain(0, 200, model=MODEL, batch_size=32, error_rate=0.0)
    assert float(last) < 0.8 * float(first)
