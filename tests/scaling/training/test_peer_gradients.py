"""Gradients of training compared with those of transformers, parameter by parameter.

The gradients come from `golden/make_gradients.py`, run by a Python that has torch and
transformers; this one needs neither:

    JAXKV_PEER_PYTHON=/path/to/python pytest -m slow -k peer_gradients
"""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float, Int

from jaxkv.models import ModelConfig, Params, is_selection_bias, load_model
from scaling.training import transformer_rows
from tests.support import engines
from tests.support.folders import GOLDEN

pytestmark = pytest.mark.usefixtures("full_optimization")

PEER = os.environ.get("JAXKV_PEER_PYTHON")
SCRIPT = GOLDEN / "make_gradients.py"
HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"),
    *("granitemoehybrid", "nemotron_h", "lfm2", "lfm2_moe"),
)
OTHERS = (
    *("gpt_neox", "olmo2", "olmo3", "gemma", "gemma2", "gemma3", "smollm3", "granite"),
    *("glm4", "nanochat", "phi3", "ministral3", "glm4_moe", "minimax_m2", "gpt_oss"),
    "gemma4",
)
RECORDED = "kimi_linear"
"""Golden folder with the file `gradient.safetensors`."""


@functools.partial(
    jax.jit, static_argnames="config", compiler_options=engines.FAST_COMPILE
)
def loss_and_gradient(
    params: Params, ids: Int[Array, "batch seq"], *, config: ModelConfig
) -> tuple[Float[Array, ""], Params]:
    """Returns the mean cross-entropy of the next tokens, and its derivatives."""

    def loss(params: Params) -> Float[Array, ""]:
        output = transformer_rows.run_transformer(params, ids, config=config)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            output.logits[:, :-1], ids[:, 1:]
        )
        return losses.mean()

    return jax.value_and_grad(loss)(params)


def check_gradient(name: str, weights: Path, gradient: Path) -> float:
    """Compares every parameter; returns the loss."""
    model = load_model(weights)
    expected = load_model(gradient)
    assert expected.config == model.config
    ids = jnp.asarray(np.load(GOLDEN / name / "expected.npz")["ids"])
    loss, grads = loss_and_gradient(model.params, ids, config=model.config)

    def compare(path, got: Array, wanted: Array) -> None:
        if is_selection_bias(path):  # no gradient trains it
            return
        if "layer_scale" in jax.tree_util.keystr(path):  # a constant
            assert not got.any()
            return
        scale = np.abs(wanted).max()
        assert scale > 0, path
        message = f"{name}{jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=1e-4 * scale, err_msg=message
        )

    jax.tree_util.tree_map_with_path(compare, grads, expected.params)
    return float(loss)


@pytest.mark.thorough
def test_a_recorded_gradient_is_met(tmp_path: Path) -> None:
    folder = tmp_path / RECORDED
    folder.mkdir()
    source = GOLDEN / RECORDED
    shutil.copy(source / "config.json", folder)
    shutil.copy(source / "gradient.safetensors", folder / "model.safetensors")
    check_gradient(RECORDED, source, folder)


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="JAXKV_PEER_PYTHON names no Python")
def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    names = (*HYBRIDS, *OTHERS)
    subprocess.run(
        [
            *(str(PEER), str(SCRIPT), str(tmp_path)),
            *(str(GOLDEN / x) for x in names),
            "--scale=0.5",
        ],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    losses = json.loads((tmp_path / "loss.json").read_text())
    for name in names:
        folders = (tmp_path / kind / name for kind in ("weights", "gradients"))
        loss = check_gradient(name, *folders)
        assert loss == pytest.approx(losses[name], rel=1e-5)
