"""A jitted decode loop with a paged KV cache, for research on decoding itself."""

from pathlib import Path

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv import decoding
from jaxkv.models import PagedForward, load_model, make_model_pages


def main(
    model: str | Path | None = None, prompt: str = "def main(", num_tokens: int = 24
) -> str:
    """Continues a prompt greedily, in one compiled program.

    Args:
      model: Hugging Face folder of a byte-level model; None means the bundled one.
      prompt: text to continue.
      num_tokens: tokens to generate.

    Returns:
      The generated text.
    """
    loaded = load_model(model or jaxkv.bundled_model())
    step = PagedForward(loaded.config)
    cache = decoding.init_cache(
        make_model_pages(loaded.config, jaxkv.EngineConfig(num_pages=32)),
        max_slots=1,
        max_length=128,
    )

    @jax.jit
    def greedy(params, cache, prompt, length):
        def one(carry, _):
            token, cache = carry
            logits, cache, _ = decoding.decode_step(params, cache, token, forward=step)
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache), token

        logits, cache, _ = decoding.prefill(params, cache, prompt, length, forward=step)
        first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.lax.scan(one, (first, cache), None, length=num_tokens)[1]

    tokens = jnp.asarray([list(prompt.encode())], jnp.int32)
    length = jnp.asarray([tokens.shape[1]], jnp.int32)
    answer = greedy(loaded.params, cache, tokens, length)[:, 0]
    return bytes(answer.tolist()).decode(errors="replace")


if __name__ == "__main__":
    print(main())
