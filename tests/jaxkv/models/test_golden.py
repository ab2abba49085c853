"""Arithmetic compared with transformers on tiny models of every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int32

from jaxkv import models
from jaxkv.models import Params, load_model, read_config, stack_layers
from jaxkv.models.config import ModelConfig
from jaxkv.models.huggingface.families import FAMILIES
from tests.support import engines
from tests.support.folders import GOLDEN

pytestmark = pytest.mark.usefixtures("full_optimization")

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))


compiled = functools.partial(
    jax.jit, static_argnames="config", compiler_options=engines.FAST_COMPILE
)
full_logits = compiled(models.logits)


@compiled
def continue_greedily(
    params: Params,
    tokens: Int32[Array, "1 length"],
    num_prompt: int,
    config: ModelConfig,
) -> Int32[Array, "1 length"]:
    """Appends greedy tokens to the prompt, with one full forward pass per token."""

    def step(index, tokens):
        logits = models.logits(params, tokens, config=config)
        token = jnp.argmax(logits[0, index - 1]).astype(jnp.int32)
        return tokens.at[0, index].set(token)

    return jax.lax.fori_loop(num_prompt, tokens.shape[1], step, tokens)


def test_every_family_has_a_golden_folder() -> None:
    families = {read_config(GOLDEN / name).family for name in FOLDERS}
    assert families == {name for name, x in FAMILIES.items() if x.servable}
    assert len(list((GOLDEN / "sharded").glob("*.safetensors"))) >= 3
    odd = read_config(GOLDEN / "qwen3")
    assert odd.head_dim * odd.num_q_heads != odd.hidden_size
    assert read_config(GOLDEN / "mistral").window == 8
    assert read_config(GOLDEN / "llama3").rope_scaling is not None


THOROUGH = """deepseek_v3 gemma3 gpt2 gpt_oss lfm2 llama mistral mixtral nemotron_h opt
qwen2 sharded""".split()
"""One folder of each kind of layer; the other families are slow."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in THOROUGH else pytest.mark.slow) for x in FOLDERS],
)
def test_logits_and_greedy_tokens_agree(name: str) -> None:
    config, params, _, _ = load_model(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected.npz")
    # Norms of small numbers enlarge the rounding of recurrent layers and of Gemma 4.
    is_plain = config.recurrence is None and not config.has_special_layers
    scale = np.abs(expected["logits"]).max()
    scale = max(1, scale / 8) if is_plain else scale
    for layers in (params, stack_layers(config, params)):
        logits = full_logits(layers, jnp.asarray(expected["ids"]), config=config)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(
            logits, expected["logits"], rtol=0, atol=1e-4 * scale
        )

    prompt = expected["prompt"]
    greedy = expected["greedy"]
    tokens = np.concatenate([prompt, np.zeros_like(greedy)])[None]
    tokens = continue_greedily(params, jnp.asarray(tokens), len(prompt), config)
    assert greedy.shape == (64,)
    np.testing.assert_array_equal(tokens[0, len(prompt) :], greedy)
