"""A model family of your own with known arithmetic, added in one file.

The family `late` is Llama's, with other names of tensors, norms after attention and
MLP, and a window in every second layer. Its folders are then saved, read, served,
trained and counted as those of the library's families.
"""

import tempfile

import jax

import jaxkv
from jaxkv.models import (
    FAMILIES,
    AttentionKind,
    ModelConfig,
    init_params,
    register_family,
    save_model,
)
from scaling.costs import count_parameters
from scaling.shapes import load_shape

llama = FAMILIES["llama"]
modules = {
    name: names
    for name, names in llama.modules.items()
    if name not in (".attention_norm", ".mlp_norm")
}
LATE = llama._replace(
    architecture="LateForCausalLM",
    implied={**llama.implied, "norm_places": "after"},
    windows="even",
    modules={
        **modules,
        ".out": (".self_attn.out",),
        ".attention_out_norm": (".norm_of_attention",),
        ".mlp_out_norm": (".norm_of_mlp",),
    },
)


def main():
    """Saves a random model of the family, counts its parameters, and serves it."""
    register_family("late", LATE)
    config = ModelConfig(
        family="late",
        norm_places="after",
        attention_pattern=(1, 0),
        other_attention=(AttentionKind(window=8),),
        **{"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "mlp_size": 48},
        **{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": 64},
        tie_embeddings=False,
    )
    params = init_params(config, jax.random.key(0))
    with tempfile.TemporaryDirectory() as parent:
        folder = save_model(f"{parent}/late", config, params)
        print(count_parameters(load_shape(folder)).total, "parameters")
        engine = jaxkv.Engine.load(folder, num_pages=16, max_slots=1, max_length=48)
        [answer] = engine.generate([[1, 2, 3]], jaxkv.Sampling.greedy(max_tokens=8))
        print("served:", answer.tokens)
    return answer.tokens


if __name__ == "__main__":
    main()
