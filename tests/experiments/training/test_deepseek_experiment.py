"""Attention, balance of experts and drafts are compared at equal active compute."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.training.deepseek import experiment, runs, serving
from experiments.training.deepseek.serving import DraftDepths, ServedModels
from scaling.costs import kv_bytes_per_token
from scaling.shapes import describe_config
from scaling.training import StreamScore, serving_config, training_flops
from tests.support import smoke
from tests.support.impatience import Stopping

(STUDY,) = load_experiment("deepseek").studies
CPU = experiment.CONFIGS["cpu"]


def test_all_kinds_have_equal_compute_and_the_counted_bytes() -> None:
    models = {kind: CPU.run_of(kind, 0).model for kind in runs.BLOCK_KINDS}
    shapes = CPU.shapes
    page_bytes = {}
    wanted = training_flops(models["MHA"], sequence=CPU.seq_len)
    for kind, model in models.items():
        model = serving_config(model)
        bare = dataclasses.replace(model, num_ahead_layers=0)
        counted = training_flops(bare, sequence=CPU.seq_len)
        assert counted == pytest.approx(wanted, rel=1e-3)
        page_bytes[kind] = serving.page_bytes_per_token(model)
        shape = describe_config(model)
        assert page_bytes[kind] == kv_bytes_per_token(shape)
    layer_bytes = 2 * shapes.num_layers
    per_head = 2 * shapes.head_dim
    latent = shapes.kv_rank + shapes.rope_dim
    assert [page_bytes[kind] / layer_bytes for kind in runs.ATTENTIONS] == [
        *(heads * per_head for heads in (shapes.num_heads, shapes.num_groups, 1)),
        latent,
    ]
    assert {
        page_bytes[kind] / layer_bytes for kind in (*runs.BALANCES, runs.FULL_BLOCK)
    } == {latent}


def test_balances_differ_in_nothing_else() -> None:
    by_loss, by_bias = (
        serving_config(CPU.run_of(kind, 0).model).experts for kind in runs.BALANCES
    )
    assert by_loss is not None
    assert by_bias is not None
    assert by_loss.balance_weight
    assert by_bias.bias_rate
    assert not by_loss.bias_rate
    assert not by_bias.balance_weight
    changed = {"bias_rate": by_bias.bias_rate, "balance_weight": 0.0}
    assert dataclasses.replace(by_loss, **changed) == by_bias


def test_a_shape_without_room_for_an_mlp_is_refused() -> None:
    shapes = dataclasses.replace(CPU.shapes, mlp_size=16)
    with pytest.raises(ValueError, match="size=-"):
        runs.make_block_model("MLA", shapes, 128)
    with pytest.raises(ValueError, match="num_heads=8 must be a multiple of"):
        dataclasses.replace(CPU.shapes, num_groups=3)


def trained(kind: runs.Kind, seed: int, losses: Any) -> runs.TrainedModel:
    """A run with given losses of its held-out windows."""
    score = StreamScore.of(np.asarray(losses)[:, None])
    unused: Any = None
    return runs.TrainedModel(kind, CPU.run_of(kind, seed), unused, score)


def test_losses_are_paired_by_window_and_seed() -> None:
    text = np.random.default_rng(0).normal(2, 1, 100)
    small = np.tile([0.01, -0.01], 50)
    models = [
        trained("MHA", 0, text),
        trained("MHA", 1, text + 5),
        trained("MLA", 0, text - 0.2 + small),
        trained("MLA", 1, text + 5 - 0.3 + small),
        trained("GQA", 0, text),
    ]
    mean, low, high = runs.loss_difference(models, "MLA", "MHA")
    assert mean == pytest.approx(-0.25)
    # Student's t of two seeds; their standard error is half their range.
    half = np.hypot(2 * small.std(ddof=1) / 10, 12.7062 * 0.05)
    np.testing.assert_allclose([low, high], [mean - half, mean + half], rtol=1e-6)
    # A single seed has no spread; equal losses have no error.
    np.testing.assert_array_equal(runs.loss_difference(models, "GQA", "MHA"), 0)
    assert np.isnan(runs.loss_difference(models, "MQA", "MHA")).all()


def made_result(sign: float) -> experiment.Result:
    """A result whose stated directions hold for -1, fail for 1, are open for 0."""
    difference = 0.1 * sign
    model = dict.fromkeys(runs.BLOCK_KINDS, 0.0)
    rows = [
        (kind, 0, 9, 9, 1e6, 64.0, 64.0, 1, 2 + loss, 0.01, 1.0)
        for kind, loss in model.items()
    ]
    pairs = [
        (*pair, difference, difference - 0.05, difference + 0.05)
        for pair in experiment.COMPARED_PAIRS
    ]
    balance = [
        (kind, seed, step, 2 + 0.5 * seed + sign * (kind == "balanced by bias"))
        for kind in runs.BALANCES
        for seed in (0, 1)
        for step in (10, 20)
    ]
    speeds = np.array([100.0, 110.0])
    ratio = np.array([1 - 0.2 * sign, 1.1 - 0.2 * sign])
    ratio = ratio if sign else np.array([0.9, 1.1])
    served = [
        ("MHA", 1, speeds, 1.0, 1.0, 64.0, 8, 0),
        ("DeepSeek", 1, speeds, 1.0, 1.0, 64.0, 8, 0),
        (serving.WITH_DRAFTS, 1, ratio * speeds, 1.0, 2.0, 64.0, 8, 0),
    ]
    return experiment.Result(
        models=experiment.TrainedModels.of(rows),
        differences=experiment.LossDifferences.of(pairs),
        balance=experiment.ExpertBalance.of(balance),
        served=ServedModels.of(served),
        depths=DraftDepths.of([(1, 10, 6), (2, 10, 3)]),
        device="cpu",
    )


@pytest.mark.parametrize(
    ("sign", "verdict"), [(-1.0, "holds"), (1.0, "fails"), (0.0, "not decided")]
)
def test_directions_are_judged_by_intervals(sign: float, verdict: str) -> None:
    result = made_result(sign)
    by_claim = {claim.claim.partition(":")[0]: claim for claim in STUDY.claims(result)}
    judged = [claim for claim in by_claim.values() if claim.direction]
    assert len(judged) == 7
    assert {claim.direction for claim in judged} == {verdict}
    accepted = by_claim["share of the first drafts that are accepted"]
    assert accepted.ours == 60
    np.testing.assert_allclose(result.depths.accepted_share, [0.6, 0.3])
    np.testing.assert_allclose(result.depths.conditional_share, [0.6, 0.5])


def test_an_empty_run_has_a_report() -> None:
    config = experiment.CONFIGS["smoke"]
    config = dataclasses.replace(config, **smoke.CHANGES["deepseek"](config))
    empty_result = experiment.run(config, Stopping(0))
    assert len(empty_result.models) == 0
    assert STUDY.claims(empty_result) == []
    assert STUDY.metrics(empty_result)["models"] == []
    assert STUDY.report_parts(empty_result) == []


@pytest.mark.slow
def test_smoke_trains_and_serves() -> None:
    smoke_run = smoke.run("deepseek")
    result = smoke_run.result
    config = smoke_run.config
    assert result.models.kind.tolist() == list(config.kinds)
    assert (result.models.loss < 5.6).all()  # log(257) is 5.55, before training
    np.testing.assert_array_equal(result.models.kv_bytes, result.models.kv_formula)
    assert result.balance.distinct("kind") == list(runs.BALANCES)
    # Of 4 experts 2 are chosen, so that the busiest has at most twice the mean load.
    assert (result.balance.busiest >= 1).all()
    assert (result.balance.busiest <= 2 + 1e-6).all()
    assert result.served.way.tolist() == ["MHA", "DeepSeek", serving.WITH_DRAFTS]
    assert (result.served.num_other == 0).all()
    assert (result.served.num_tokens == 2 * 8).all()
    drafting = result.served.where(way=serving.WITH_DRAFTS)
    plain = result.served.where(way="DeepSeek")
    assert drafting.pool_bytes[0] > plain.pool_bytes[0]
    assert (np.diff(result.depths.accepted) <= 0).all()
    assert (result.depths.accepted <= result.depths.drafted).all()
