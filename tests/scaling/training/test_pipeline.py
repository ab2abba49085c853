"""Stages of layers: the gradient of one device, and how long stages are idle."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import Experts, transformer
from jaxkv.parallel import collectives
from scaling.costs import parallelism, traffic
from scaling.shapes import from_model
from scaling.training import meshes, objectives, parallel, pipeline
from scaling.training.recipes import StepConfig
from tests.support.meshes import MODEL, SEQ, WINDOWS

pytestmark = pytest.mark.usefixtures("fast_compile")
KINDS = ("gpipe", "1f1b")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (2, 1), (2, 4), (4, 3), (4, 9)])
def test_every_micro_batch_goes_through_every_stage(
    stages: int, micro: int, kind: Literal["gpipe", "1f1b"]
) -> None:
    found = pipeline.schedule(stages, micro, kind)
    when = {}
    for name, table in (("forward", found.forward), ("backward", found.backward)):
        for stage in range(stages):
            ticks = {m: t for t, m in enumerate(table[:, stage]) if m >= 0}
            assert sorted(ticks) == list(range(micro))
            when |= {(name, stage, m): t for m, t in ticks.items()}
    for m in range(micro):
        for stage in range(stages - 1):
            # The next tick's stage takes what is sent, and no later one.
            assert when["forward", stage + 1, m] == when["forward", stage, m] + 1
            assert when["backward", stage, m] == when["backward", stage + 1, m] + 1
        last = stages - 1
        assert when["backward", last, m] >= when["forward", last, m]
    for stage in range(stages):
        under_way = (found.forward[:, stage] >= 0).cumsum()
        done = np.concatenate([[0], (found.backward[:, stage] >= 0).cumsum()[:-1]])
        assert (under_way - done).max() <= found.kept
    bubble = (stages - 1) / (micro + stages - 1)
    assert found.idle_share == pytest.approx(bubble, abs=1e-12)


def test_1f1b_keeps_no_more_micro_batches_than_stages_ask_for() -> None:
    assert pipeline.schedule(4, 64, "1f1b").kept == 7
    assert pipeline.schedule(4, 64, "gpipe").kept == 64


def check(layout: str, kind: Any, num_micro: int, **fields: Any) -> None:
    config = dataclasses.replace(MODEL, num_layers=4, **fields)
    divided = parallelism.parse(layout)
    meshes.check(config, divided, sequence_length=SEQ)
    params = transformer.init_params(config, jax.random.key(0))
    windows = jnp.asarray(WINDOWS)
    placed = meshes.place(config, divided, params)
    how = StepConfig(layout=divided, accumulation=num_micro, schedule=kind)
    run = jax.jit(parallel.gradient(config, how))
    program = run.lower(placed, windows).compile()
    loss, grads = program(placed, windows)
    (_, whole), wanted = jax.value_and_grad(
        lambda params: objectives.mean_loss(params, windows, model=config),
        has_aux=True,
    )(params)
    np.testing.assert_allclose(loss, whole, rtol=1e-5)
    grads = transformer.unstack_layers(config, jax.tree.map(np.asarray, grads))
    for found, one in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, one, rtol=0, atol=1e-4 * np.abs(one).max())
    # In every tick a state goes on and a gradient back, be they meant or not.
    sent = collectives.collectives(str(program.as_text()))
    hops = [each for each in sent if each.kind == "collective-permute"]
    assert all(each.is_sure for each in hops)
    formula = traffic.training(
        *(from_model.describe(config), dataclasses.replace(divided, tensor=1)),
        batch=len(WINDOWS) // divided.data // num_micro,
        sequence=SEQ,
        number_bytes=4,
    )
    of_micro = sum(
        each.forward + each.backward for each in formula if each.scheme == "pipeline"
    )
    ticks = len(pipeline.schedule(divided.pipeline, num_micro, kind).forward)
    assert sum(each.sent() for each in hops) == ticks * of_micro


@pytest.mark.parametrize(
    ("layout", "kind", "num_micro"),
    [
        pytest.param("pp=2", "gpipe", 2, marks=pytest.mark.thorough),
        ("pp=4", "1f1b", 4),
        pytest.param("pp=2,tp=2,dp=2", "1f1b", 2, marks=pytest.mark.thorough),
        pytest.param("pp=2,tp=2,dp=2", "gpipe", 2, marks=pytest.mark.slow),
        pytest.param("pp=4", "gpipe", 4, marks=pytest.mark.slow),
        pytest.param("pp=2,dp=2", "1f1b", 1, marks=pytest.mark.slow),
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


@pytest.mark.thorough
def test_stages_of_mixtures() -> None:
    """One micro-batch, as the loss of balance is that of each."""
    experts = Experts(num_experts=4, top_k=2, size=24, balance_weight=0.5)
    check("pp=2,dp=2", "1f1b", 1, experts=experts)


def test_a_schedule_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="num_micro=0 must be at least 1"):
        pipeline.schedule(2, 0)
