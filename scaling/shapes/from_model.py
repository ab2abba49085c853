"""Our own models as the cost formulas see them."""

from jaxkv.models import ModelConfig
from scaling.shapes.description import ModelShape, describe_fields


def describe_config(config: ModelConfig, *, name: str = "") -> ModelShape:
    """Describes a model that we can run.

    Args:
      config: its shape.
      name: what tables call it; its family by default.
    """
    # JAX, which `jaxkv cost` starts without.
    from jaxkv.models import nonlinear

    parts = {
        "name": name or config.family,
        "experts": config.experts and vars(config.experts),
        "mixture_layers": tuple(map(config.is_mixture, range(config.num_layers))),
        "norm": "layer" if nonlinear.NORMS[config.norm].has_bias else "rms",
        "windows": (config.window,),
    }
    return describe_fields({**vars(config), **parts})
