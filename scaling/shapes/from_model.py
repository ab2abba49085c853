"""Shapes of `jaxkv` model configs."""

from jaxkv.models import AttentionKind, ModelConfig
from scaling.shapes.description import (
    HeadAttention,
    LayerSizes,
    ModelShape,
    build_record,
    describe_fields,
)


def describe_config(config: ModelConfig, *, name: str = "") -> ModelShape:
    """Returns the shape of a model config.

    Args:
      config: the model config.
      name: name in tables; the model's family by default.

    Raises:
      ValueError: layers have both sizes of their own and experts in place of an MLP.
    """
    # Imports JAX, without which `jaxkv cost` starts.
    from jaxkv.models import NORMS

    form = NORMS[config.norm]
    norm = "layer" if form.has_bias else "rms" if form.has_scale else "rms_plain"
    parts = {
        "norm": norm,
        "name": name or config.family,
        "experts": config.experts and vars(config.experts),
        "mixture_layers": tuple(map(config.is_mixture, range(config.num_layers))),
        "windows": config.windows,
        "recurrent": config.recurrence and vars(config.recurrence),
        "recurrent_layers": tuple(
            layer in config.recurrent_layers for layer in range(config.num_layers)
        ),
    }
    if config.residual == "single":
        names = {None: "attention", "mlp": "dense", "experts": "mixture"}
        kinds = [
            config.attention_kinds[config.kind_of(x)] for x in range(config.num_layers)
        ]
        parts["branches"] = tuple(
            "recurrent" if kind.is_recurrent else names[kind.feed_forward]
            for kind in kinds
        )
    if config.has_special_layers:
        parts["layer_sizes"] = tuple(
            _describe_sizes(config, config.attention_kinds[config.kind_of(layer)])
            for layer in range(config.num_layers)
        )
    latent = {} if config.latent is None else vars(config.latent)
    return describe_fields({**vars(config), **latent, **parts})


def _describe_sizes(config: ModelConfig, kind: AttentionKind) -> LayerSizes:
    """Returns the sizes of the layers of a kind."""
    sizes = vars(config.of_kind(kind)) | {"shares_kv": kind.shares_kv}
    return LayerSizes(
        attention=build_record(HeadAttention, sizes), mlp_size=sizes["mlp_size"]
    )
