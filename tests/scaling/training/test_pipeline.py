"""Pipeline stages: the gradient of one device, and the idle time of stages."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import Experts, ModelConfig, init_params, param_forms
from jaxkv.parallel import collectives
from scaling.costs import parse_layout, training_traffic
from scaling.costs import stages as costs_stages
from scaling.shapes import describe_config
from scaling.training import (
    check_trainable,
    divided_gradient,
    objectives,
    pipeline,
    place_training_tree,
)
from scaling.training.recipes import StepConfig
from tests.support.meshes import MODEL, SEQ, WINDOWS

KINDS: tuple[Any, ...] = ("gpipe", "1f1b")
SLOW = pytest.mark.slow
MIXTURE: dict[str, Any] = {"experts": Experts(num_experts=8, top_k=2, size=24)}
LEARNED: dict[str, Any] = {"positions": "learned", "tie_embeddings": False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (2, 1), (2, 4), (4, 3), (4, 9)])
def test_every_micro_batch_goes_through_every_stage(
    stages: int, micro: int, kind: Literal["gpipe", "1f1b"]
) -> None:
    schedule = pipeline.make_pipeline_schedule(stages, micro, kind)
    when = {}
    for name, table in (("forward", schedule.forward), ("backward", schedule.backward)):
        for stage in range(stages):
            ticks = {m: t for t, m in enumerate(table[:, stage]) if m >= 0}
            assert sorted(ticks) == list(range(micro))
            when |= {(name, stage, m): t for m, t in ticks.items()}
    for m in range(micro):
        for stage in range(stages - 1):
            # The stage of the next tick takes the sent data, and no later one.
            assert when["forward", stage + 1, m] == when["forward", stage, m] + 1
            assert when["backward", stage, m] == when["backward", stage + 1, m] + 1
        last = stages - 1
        assert when["backward", last, m] >= when["forward", last, m]
    for stage in range(stages):
        under_way = (schedule.forward[:, stage] >= 0).cumsum()
        done = np.concatenate([[0], (schedule.backward[:, stage] >= 0).cumsum()[:-1]])
        assert (under_way - done).max() <= schedule.num_stored
    bubble = (stages - 1) / (micro + stages - 1)
    assert schedule.idle_share == pytest.approx(bubble, abs=1e-12)


def test_1f1b_keeps_no_more_micro_batches_than_stages_ask_for() -> None:
    assert pipeline.make_pipeline_schedule(4, 64, "1f1b").num_stored == 7
    assert pipeline.make_pipeline_schedule(4, 64, "gpipe").num_stored == 64


def check(layout: str, kind: Any, num_micro: int, **fields: Any) -> None:
    config = dataclasses.replace(MODEL, num_layers=4, **fields)
    divided = parse_layout(layout)
    check_trainable(config, divided, sequence_length=SEQ)
    params = init_params(config, jax.random.key(0))
    windows = jnp.asarray(WINDOWS)
    placed = place_training_tree(config, divided, params)
    how = StepConfig(layout=divided, accumulation=num_micro, schedule=kind)
    run = jax.jit(divided_gradient(config, how))
    program = run.lower(placed, windows).compile()
    loss, grads = program(placed, windows)
    (_, expected_loss), expected = jax.value_and_grad(
        lambda params: objectives.mean_loss(params, windows, model=config),
        has_aux=True,
    )(params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    grads = param_forms.unstack_layers(config, jax.tree.map(np.asarray, grads))
    for grad, one in zip(
        jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(grad, one, rtol=0, atol=1e-4 * np.abs(one).max())
    check_bytes(config, how, program)


def check_bytes(
    config: ModelConfig, how: StepConfig, program: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Checks that the bytes sent by the program equal those of the formulas."""
    sent = of_program(program, how)
    expected = by_formulas(config, how)
    assert sum(sent.values()) == sum(expected.values())
    table = pipeline.make_pipeline_schedule(
        how.layout.pipeline, how.accumulation, how.schedule
    )
    passed = expected["pipeline"] * len(table.forward) / how.accumulation
    assert sent["collective-permute"] == passed
    return sent, expected


def of_program(program: Any, how: StepConfig) -> dict[str, float]:
    """Returns the bytes that a device sends in a step, by kind of collective.

    A branch runs once for each micro-batch, of all ticks of the loop.
    """
    table = pipeline.make_pipeline_schedule(
        how.layout.pipeline, how.accumulation, how.schedule
    )
    sent_by_kind = dict.fromkeys(collectives.COLLECTIVE_KINDS, 0.0)
    for exchange in collectives.find_collectives(str(program.as_text())):
        assert exchange.trips in (1, len(table.forward))
        share = 1.0 if exchange.is_sure else how.accumulation / len(table.forward)
        sent_by_kind[exchange.kind] += exchange.sent(rank=1) * share
    assert sent_by_kind["collective-permute"]
    return sent_by_kind


def by_formulas(config: ModelConfig, how: StepConfig) -> dict[str, float]:
    """Returns the same by `traffic`, by scheme."""
    sent_by_scheme: dict[str, float] = {}
    for term in training_traffic(
        describe_config(config),
        how.layout,
        batch=len(WINDOWS) // how.layout.data // how.accumulation,
        sequence=SEQ,
        number_bytes=4,
        gradient_bytes=4,
        micro_batches=how.accumulation,
        schedule=how.schedule,
    ):
        sent = term.forward + term.backward
        sent_by_scheme[term.scheme] = sent_by_scheme.get(term.scheme, 0.0) + sent
    return sent_by_scheme


def compiled(config: ModelConfig, how: StepConfig) -> Any:
    params = init_params(config, jax.random.key(0))
    placed = place_training_tree(config, how.layout, params)
    run = jax.jit(divided_gradient(config, how))
    return run.lower(placed, jnp.asarray(WINDOWS)).compile()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "kind", "fields"),
    [
        ("pp=2", "gpipe", {"tie_embeddings": False}),
        ("pp=2,tp=2", "1f1b", {}),
        pytest.param("pp=2,tp=2,sp,dp=2", "gpipe", {}, marks=SLOW),
        pytest.param("pp=2,ep=2,dp=2,gather", "1f1b", MIXTURE, marks=SLOW),
        pytest.param("pp=2,dp=2,ep=2,capacity=4", "1f1b", MIXTURE, marks=SLOW),
        pytest.param("pp=2,tp=2", "1f1b", MIXTURE, marks=SLOW),
        pytest.param("pp=2,tp=2,dp=2", "1f1b", LEARNED, marks=SLOW),
    ],
)
def test_bytes_are_those_of_formulas_and_grow_with_the_layers(
    layout: str, kind: Any, fields: dict[str, Any]
) -> None:
    """Idle ticks, tables, and recomputed layers; for two layers and for four."""
    how = StepConfig(layout=parse_layout(layout), accumulation=2, schedule=kind)
    byte_counts = []
    for num_layers in (2, 4):
        config = dataclasses.replace(MODEL, num_layers=num_layers, **fields)
        byte_counts.append(check_bytes(config, how, compiled(config, how)))
    (sent, expected), (more, more_expected) = byte_counts
    # Transfers between stages and tables' gradients are the same for more layers.
    assert more["collective-permute"] == sent["collective-permute"]
    assert more_expected["tables"] == expected["tables"]
    if how.layout.tensor > 1:
        assert more_expected["tensor"] == 2 * expected["tensor"]
        assert sum(more.values()) > sum(sent.values())


@pytest.mark.thorough
def test_an_extra_exchange_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug is a stage that sends unused data in each tick."""
    how = StepConfig(layout=parse_layout("pp=2"), accumulation=2)
    original = pipeline._Run._pass

    def wasteful(self: Any, x: Any, on: list[tuple[int, int]]) -> Any:
        return original(self, x, on) + 1e-9 * original(self, x * 2, on)

    monkeypatch.setattr(pipeline._Run, "_pass", wasteful)
    sent = of_program(compiled(MODEL, how), how)
    expected = by_formulas(MODEL, how)
    # Of four ticks: 2 sequences, both ways.
    more = 4 * 2 * SEQ * MODEL.hidden_size * 4 * 2
    assert sum(sent.values()) - sum(expected.values()) == more


def test_ticks_are_those_of_the_table() -> None:
    for stages, micro in ((1, 1), (2, 1), (2, 4), (4, 3), (4, 9)):
        for kind in KINDS:
            table = pipeline.make_pipeline_schedule(stages, micro, kind)
            assert costs_stages.count_ticks(stages, micro, kind) == len(table.forward)


@pytest.mark.parametrize(
    ("layout", "kind", "num_micro"),
    [
        pytest.param("pp=2", "gpipe", 2, marks=SLOW),
        ("pp=4", "1f1b", 4),
        pytest.param("pp=2,tp=2,dp=2", "1f1b", 2, marks=pytest.mark.thorough),
        pytest.param("pp=2,tp=2,dp=2", "gpipe", 2, marks=SLOW),
        pytest.param("pp=4", "gpipe", 4, marks=SLOW),
        pytest.param("pp=2,dp=2", "1f1b", 1, marks=SLOW),
    ],
)
def test_stages_give_the_gradient_of_one_device(
    layout: str, kind: str, num_micro: int
) -> None:
    check(layout, kind, num_micro)


@pytest.mark.slow
def test_stages_of_another_family() -> None:
    fields: Any = {"tie_embeddings": False, "qk_norm": True}
    check("pp=2,tp=2", "1f1b", 2, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("gate_bias", [False, True])
def test_stages_of_mixtures(gate_bias: bool) -> None:
    """One micro-batch, as the load-balancing loss is that of each."""
    experts = Experts(
        num_experts=4, top_k=2, size=24, balance_weight=0.5, gate_bias=gate_bias
    )
    check("pp=2,dp=2", "1f1b", 1, experts=experts)


def test_an_empty_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="num_micro=0 must be at least 1"):
        pipeline.make_pipeline_schedule(2, 0)
