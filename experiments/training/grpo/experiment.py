"""Trains small policies by rewards that a program checks, and injects mismatch.

A policy is pretrained on demonstrations with errors, and improved by group-relative
policy optimisation. The sampler is the serving engine; with reproducible numerics it
agrees with the trainer in every bit. Then differences between both are injected, on
the same seeds, and the rewards are compared.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from experiments import lab
from experiments.training.grpo import runs
from experiments.training.grpo.runs import EXACT, MISMATCHES, Config, SeedRuns
from scaling.fits import student_t
from scaling.policy import PolicyConfig, PolicyInfo, pass_at_k

_TINY = dataclasses.replace(
    PolicyConfig().model, hidden_size=16, num_q_heads=2, head_dim=8, mlp_size=32
)
CONFIGS = {
    "cpu": Config(),
    "smoke": Config(
        tasks=("language",),
        mismatches=(EXACT, "parameters 10 %"),
        policy=PolicyConfig(model=_TINY, num_prompts=4, group_size=4),
        num_pretraining=50,
        num_seeds=2,
        num_rollouts=4,
        num_compared=2,
        num_call=2,
    ),
}
LEVEL = 0.99
"""Level of intervals of differences, so that eight of them hold together in 92 %."""
NUM_LAST = 20
"""Rollouts at the end whose reward is reported."""


class LearnedTask(lab.ResultTable):
    """Runs without mismatch."""

    task: lab.Texts = lab.column("name of the task")
    seed: lab.Ints = lab.column("seed of prompts and draws")
    first_reward: lab.Floats = lab.column(
        "mean reward of the first rollout", form="{:.3f}"
    )
    reward: lab.Floats = lab.column(
        "mean reward of the last rollouts", form="{:.3f}", heading="last reward"
    )
    first_pass: lab.Floats = lab.column(
        "probability that one of k answers is right, first rollout",
        heading="first pass@k",
        form="{:.3f}",
    )
    last_pass: lab.Floats = lab.column(
        "the same, last rollouts", heading="last pass@k", form="{:.3f}"
    )
    kl: lab.Floats = lab.column(
        "divergence from the policy at the start, nats per token, last rollouts",
        heading="KL",
        form="{:.2f}",
    )
    first_entropy: lab.Floats = lab.column(
        "nats per token, first rollout", form="{:.2f}"
    )
    entropy: lab.Floats = lab.column(
        "nats per token, last rollouts", heading="last entropy", form="{:.2f}"
    )
    length: lab.Floats = lab.column("mean tokens of an answer, last", form="{:.2f}")
    num_tokens: lab.Ints = lab.column("tokens of all answers", heading="tokens")
    num_different: lab.Ints = lab.column(
        "tokens whose log-probability differs between sampler and trainer",
        heading="different",
    )
    k3: lab.Floats = lab.column("largest k3 divergence", form="{:.1e}")
    seconds: lab.Floats = lab.column(
        "of sampling and training", heading="time", form=lab.format_seconds
    )

    @property
    @lab.computed_column(heading="tokens/s", form="{:,.0f}")
    def tokens_per_s(self) -> np.ndarray:
        """Sampled and trained tokens per second."""
        return self.num_tokens / self.seconds


class MismatchRuns(lab.ResultTable):
    """Runs with mismatch, means over seeds."""

    mismatch: lab.Texts = lab.column("difference between sampler and trainer")
    k3: lab.Floats = lab.column(
        "divergence between both, nats per token", form="{:.1e}"
    )
    largest: lab.Floats = lab.column(
        "largest difference of a log-probability", heading="largest gap", form="{:.2g}"
    )
    different_share: lab.Floats = lab.column(
        "tokens whose log-probability differs", heading="different"
    )
    clipped_share: lab.Floats = lab.column("clipped tokens of the last update")
    reward: lab.Floats = lab.column("mean reward of the last rollouts", form="{:.3f}")
    worst: lab.Floats = lab.column(
        "the same, worst seed", heading="worst seed", form="{:.3f}"
    )
    change: lab.Floats = lab.column(
        "reward less that without mismatch, by seed", form="{:+.3f}"
    )
    low: lab.Floats = lab.column("lower end of its 99 % interval", form="{:+.3f}")
    high: lab.Floats = lab.column("upper end of its 99 % interval", form="{:+.3f}")
    fall: lab.Floats = lab.column(
        "best mean of ten rollouts less the last ten", form="{:.3f}"
    )
    kl: lab.Floats = lab.column(
        "divergence from the policy at the start, median over seeds of the last "
        "rollouts",
        heading="KL",
        form="{:.2f}",
    )
    entropy: lab.Floats = lab.column("nats per token, last rollouts", form="{:.2f}")
    tokens_per_s: lab.Floats = lab.column(
        "sampled tokens per second", heading="tokens/s", form="{:,.0f}"
    )


class Result(lab.ResultRecord):
    """Learning curves, mismatch, and seeds alone and together."""

    num_tries: int = lab.column("k of pass@k, half a group", heading="k of pass@k")
    pretraining_loss: float = lab.column("nats per token of the last batch")
    pretraining_s: float = lab.column("time, with compilation")
    learned: LearnedTask = lab.column(
        "runs without mismatch", heading="Learning, by task and seed"
    )
    mismatched: MismatchRuns = lab.column(
        "runs with mismatch, first task", heading="Mismatch, means over seeds"
    )
    check: runs.SeedCheck = lab.column(
        "two calls of each seed, alone and mapped", heading="Seeds alone and mapped"
    )
    rewards: Float[np.ndarray, "tasks seeds rollouts"] = lab.column("mean reward")
    passes: Float[np.ndarray, "tasks seeds rollouts"] = lab.column("mean pass@k")
    entropies: Float[np.ndarray, "tasks seeds rollouts"] = lab.column("nats per token")
    divergences: Float[np.ndarray, "tasks seeds rollouts"] = lab.column(
        "from the policy at the start"
    )
    lengths: Float[np.ndarray, "tasks seeds rollouts"] = lab.column(
        "tokens of an answer"
    )
    rates: Float[np.ndarray, "tasks calls"] = lab.column(
        "tokens per second of all seeds"
    )
    mismatch_rewards: Float[np.ndarray, "mismatches seeds rollouts"] = lab.column(
        "mean reward"
    )


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Pretrains, learns all tasks, and injects mismatch; keeps the finished runs."""
    injected = [name for name in config.mismatches if name != EXACT]
    total = len(config.tasks) * config.num_rollouts
    total += len(injected) * config.num_compared
    update = progress.bar("rollouts", total, "rollouts of all seeds")
    num_done = 0

    def report(info: PolicyInfo) -> bool:
        nonlocal num_done
        names = ("reward", "entropy", "kl_reference", "length")
        means = [getattr(info, name).mean(0) for name in names]  # over the seeds
        for row in zip(*means, strict=True):
            num_done += 1
            numbers = dict(zip(names, map(float, row), strict=True))
            progress.log(num_done, numbers)
        update(num_done)
        return progress.stopped

    params, loss, pretraining_s = runs.pretrain_policy(config)
    tasks: dict[str, SeedRuns] = {}
    mismatched: dict[str, SeedRuns] = {}
    first = dataclasses.replace(config.policy, task=config.tasks[0])
    check = runs.SeedCheck(0, 0, 0, 0.0, 0.0)
    if not progress.stopped:
        progress.show("seeds alone and in one program")
        check = runs.compare_seeds(params, first, config)
    for name in config.tasks:
        progress.show(name)
        policy = dataclasses.replace(config.policy, task=name)
        num_rollouts = 0 if progress.stopped else config.num_rollouts
        if num_rollouts and (
            one := runs.run_seeds(params, policy, config, num_rollouts, report)
        ):
            tasks[name] = one
    if exact := tasks.get(config.tasks[0]):
        mismatched[EXACT] = exact.first(config.num_compared // config.num_call)
    for name in injected:
        progress.show(name)
        policy = MISMATCHES[name](first)
        num_rollouts = 0 if progress.stopped else config.num_compared
        if num_rollouts and (
            one := runs.run_seeds(params, policy, config, num_rollouts, report)
        ):
            mismatched[name] = one
    group_size = config.policy.group_size
    infos = [one.info for one in tasks.values()]
    return Result(
        num_tries=group_size // 2,
        pretraining_loss=loss,
        pretraining_s=pretraining_s,
        learned=learned_table(tasks, group_size),
        mismatched=mismatch_table(mismatched),
        check=check,
        rewards=_stack([info.reward for info in infos]),
        passes=_stack([_pass_curve(one, group_size) for one in tasks.values()]),
        entropies=_stack([info.entropy for info in infos]),
        divergences=_stack([info.kl_reference for info in infos]),
        lengths=_stack([info.length for info in infos]),
        rates=_stack([one.tokens_per_s for one in tasks.values()], num_axes=2),
        mismatch_rewards=_stack([one.info.reward for one in mismatched.values()]),
    )


def _stack(curves: Sequence[ArrayLike], num_axes: int = 3) -> np.ndarray:
    """Stacks curves of equal shape; empty without any."""
    return np.stack([*map(np.asarray, curves)]) if curves else np.zeros((0,) * num_axes)


def _pass_curve(one: SeedRuns, group_size: int) -> np.ndarray:
    """Returns the mean pass@k of each rollout, with k half the group."""
    num_right = np.asarray(one.info.num_right)
    return pass_at_k(num_right, group_size, group_size // 2).mean(axis=-1)


def learned_table(tasks: dict[str, SeedRuns], group_size: int) -> LearnedTask:
    """Returns a row for each task and seed."""
    rows = []
    for name, one in tasks.items():
        info = one.info
        passes = _pass_curve(one, group_size)
        for seed in range(len(info.reward)):
            last = slice(-NUM_LAST, None)
            rows.append(
                {
                    "task": name,
                    "seed": seed,
                    "first_reward": info.reward[seed, 0],
                    "reward": info.reward[seed, last].mean(),
                    "first_pass": passes[seed, 0],
                    "last_pass": passes[seed, last].mean(),
                    "kl": info.kl_reference[seed, last].mean(),
                    "first_entropy": info.entropy[seed, 0],
                    "entropy": info.entropy[seed, last].mean(),
                    "length": info.length[seed, last].mean(),
                    "num_tokens": info.num_tokens[seed].sum(),
                    "num_different": info.num_different[seed].sum(),
                    "k3": info.k3[seed].max(),
                    "seconds": one.seconds.sum() / len(info.reward),
                }
            )
    return LearnedTask.of(rows)


def mismatch_table(mismatched: dict[str, SeedRuns]) -> MismatchRuns:
    """Returns a row for each mismatch, with intervals of the change by seed."""
    rows = []
    for name, one in mismatched.items():
        info = one.info
        num_last = min(10, info.reward.shape[1])
        rewards = np.asarray(info.reward)
        ends = rewards[:, -num_last:].mean(axis=1)
        change = low = high = np.nan
        if EXACT in mismatched:
            exact = np.asarray(mismatched[EXACT].info.reward)
            differences = ends - exact[:, -num_last:].mean(axis=1)
            change, low, high = mean_interval(differences)
        means = np.lib.stride_tricks.sliding_window_view(rewards, num_last, axis=1)
        num_tokens = info.num_tokens.sum()
        rows.append(
            {
                "mismatch": name,
                "k3": info.k3.mean(),
                "largest": info.largest.max(),
                "different_share": info.num_different.sum() / num_tokens,
                "clipped_share": info.clipped.mean(),
                "reward": ends.mean(),
                "worst": ends.min(),
                "change": change,
                "low": low,
                "high": high,
                "fall": (means.mean(axis=-1).max(axis=1) - ends).mean(),
                "kl": np.median(info.kl_reference[:, -num_last:].mean(axis=1)),
                "entropy": info.entropy[:, -num_last:].mean(),
                "tokens_per_s": num_tokens / one.seconds.sum(),
            }
        )
    return MismatchRuns.of(rows)


def mean_interval(
    values: Float[np.ndarray, " seeds"], level: float = LEVEL
) -> tuple[float, float, float]:
    """Returns the mean over seeds and its interval by Student's distribution."""
    num = len(values)
    half = student_t(level, num - 1) * float(np.std(values, ddof=1)) / num**0.5
    mean = float(np.mean(values))
    return mean, mean - half, mean + half


SHOWN = (
    EXACT,
    "parameters 10 %",
    "10 %, ratio to trainer",
    "8 updates a rollout",
    "8 updates, by answer",
)
"""Mismatches whose curves are drawn."""


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws learning, divergence and entropy, and rewards with mismatch."""
    learning, spread, curves, changes = axes.flat
    names = result.learned.distinct("task")
    looks = ((lab.BLUE, "-"), (lab.ORANGE, "--"), (lab.GREEN, "-."), (lab.PURPLE, ":"))
    for index, name in enumerate(names):
        color, line = looks[index]
        rewards = _smooth(result.rewards[index])
        place = 1 + np.arange(rewards.shape[1])
        look = {"marker": "", "linestyle": line}
        lab.draw_curve(
            learning, place, rewards.mean(axis=0), color, f"{name}, pass@1", **look
        )
        lab.shade_band(
            learning,
            place,
            rewards.min(axis=0),
            rewards.max(axis=0),
            lab.colors()[color],
            0.2,
        )
        passes = _smooth(result.passes[index]).mean(axis=0)
        label = f"{name}, pass@{result.num_tries}"
        lab.draw_curve(
            learning, place, passes, color, label, marker="", linestyle=":", alpha=0.8
        )
        for values, quantity, width in (
            (result.entropies, "entropy", 1.6),
            (result.divergences, "KL to the start", 0.8),
        ):
            mean = _smooth(values[index]).mean(axis=0)
            label = f"{name}, {quantity}"
            lab.draw_curve(spread, place, mean, color, label, **look, linewidth=width)
    title = "Rewards while learning"
    if len(result.learned):
        worst = result.learned.reward.min()
        seeds = len(result.learned.distinct("seed"))
        title = f"All {seeds} seeds reach a reward of {worst:.2f} or more"
        learning.legend()
        spread.legend()
    x = "rollout [1]"
    lab.set_labels(learning, title, x, "right answers [share]", ylim=(0, 1.02))
    title = "Entropy falls, and the policy leaves its start"
    lab.set_labels(spread, title, x, "nats per token [nats]")
    table = result.mismatched
    pairs = zip(table.mismatch.tolist(), result.mismatch_rewards, strict=False)
    shown_rewards = [(name, rewards) for name, rewards in pairs if name in SHOWN]
    palette = (lab.BLACK, lab.ORANGE, lab.RED, lab.BLUE, lab.SKY)
    styles = ("-", "--", ":", "-.", (0, (5, 1)))
    for (name, rewards), color, style in zip(
        shown_rewards, palette, styles, strict=False
    ):
        mean = _smooth(rewards).mean(axis=0)
        place = 1 + np.arange(len(mean))
        lab.draw_curve(curves, place, mean, color, name, marker="", linestyle=style)
    if shown_rewards:
        curves.legend()
    title = "Rewards with mismatch, means over seeds"
    lab.set_labels(curves, title, x, "right answers [share]", ylim=(0, 1.02))
    others = table.at(table.mismatch != EXACT)
    for index, row in enumerate(others.rows("change", "low", "high")):
        ends = (row["low"], row["high"])
        changes.plot(ends, (index, index), color=lab.colors()[lab.BLUE], marker="|")
        changes.plot(row["change"], index, color=lab.colors()[lab.BLUE], marker="o")
    changes.set_yticks(range(len(others)), others.mismatch.tolist())
    changes.invert_yaxis()
    lab.draw_reference_line(changes, 0, along="y")
    num_decided = int(np.sum((others.low > 0) | (others.high < 0)))
    title = f"{num_decided} of {len(others)} kinds of mismatch change the reward"
    lab.set_labels(changes, title, "change, 99 % interval [share]", "")


def _smooth(values: np.ndarray) -> np.ndarray:
    """Returns trailing means over at most 10 rollouts, along the last axis."""
    total = np.cumsum(values, axis=-1)
    num = np.minimum(np.arange(values.shape[-1]) + 1, 10)
    total[..., 10:] -= total[..., :-10].copy()
    return total / num


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares learning with the bars, and sampler and trainer bit for bit."""
    updates = result.rewards.shape[2]
    few = updates < 5 * NUM_LAST
    for name in result.learned.distinct("task"):
        table = result.learned.where(task=name)
        num = len(table)
        start = float(table.first_reward.max())
        yield lab.measured("start", start, task=name, seeds=num)
        end = float(table.reward.min())
        yield lab.measured(
            "learned", end, differs=few, task=name, seeds=num, rollouts=NUM_LAST
        )
        yield lab.measured("time", float(table.seconds.max()), task=name)
        tokens = f"{int(table.num_tokens.sum()):,}"
        different = float(table.num_different.sum())
        yield lab.measured("tokens", different, task=name, tokens=tokens)
        k3 = float(table.k3.max())
        yield lab.measured("divergence", k3, task=name, updates=updates)
    if result.check.num_leaves:
        num = f"{result.check.num_bytes:,}"
        yield lab.measured("seeds", float(result.check.num_different), bytes=num)


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, panels=lab.Panels(2, 2, 3.3), has_steps=True
)
