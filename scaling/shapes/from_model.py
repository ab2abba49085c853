"""Our own models as the cost formulas see them."""

from jaxkv.models import ModelConfig, nonlinear
from scaling.shapes.description import Description, Experts, HeadAttention


def describe(config: ModelConfig, *, name: str = "") -> Description:
    """Describes a model that we can run.

    Args:
      config: its shape.
      name: what tables call it; its family by default.
    """
    learned, mixed = config.positions == "learned", config.experts
    experts = None
    if mixed is not None:
        experts = Experts(
            num_experts=mixed.num_experts,
            top_k=mixed.top_k,
            size=mixed.size,
            shared_size=mixed.shared_size,
            shared_gate=mixed.shared_gate,
        )
    return Description(
        name=name or config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        attention=HeadAttention(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm=config.qk_norm,
        ),
        mlp_size=config.mlp_size,
        gated=config.gated,
        mlp_bias=config.mlp_bias,
        experts=experts,
        mixture_layers=tuple(map(config.is_mixture, range(config.num_layers))),
        norm="layer" if nonlinear.NORMS[config.norm].has_bias else "rms",
        position_rows=config.max_positions + config.position_offset if learned else 0,
        windows=(config.window,),
        tie_embeddings=config.tie_embeddings,
        max_positions=config.max_positions,
    )
