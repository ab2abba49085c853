"""Counts of a decoder-only transformer, from its shape."""


def count_transformer(shape: dict, sequence: int) -> dict[str, int]:
    """Counts parameters, operations and bytes of a model.

    Args:
      shape: `vocab_size`, `hidden_size`, `num_layers`, `num_q_heads`, `num_kv_heads`,
        `head_dim`, `mlp_size`, `is_tied`, `num_experts` (0 for a dense model) and
        `top_k`.
      sequence: tokens of one sequence.

    Returns:
      `total_params`, `active_params`, `forward_flops`, `kv_bytes_per_token` and
      `training_bytes`.
    """
    # SOLUTION
    h = shape["hidden_size"]
    layers = shape["num_layers"]
    query_size = shape["num_q_heads"] * shape["head_dim"]
    kv_size = shape["num_kv_heads"] * shape["head_dim"]
    attention = 2 * h * query_size + 2 * h * kv_size
    expert = 3 * h * shape["mlp_size"]
    num_experts = shape["num_experts"]
    router = h * num_experts
    stored = expert * max(num_experts, 1)
    used = expert * (shape["top_k"] if num_experts else 1)
    table = shape["vocab_size"] * h
    outside = table * (1 if shape["is_tied"] else 2) + h
    total = outside + layers * (attention + router + stored + 2 * h)
    multiplied = layers * (attention + router + used) + table
    pairs = 2 * 2 * layers * query_size * sequence * sequence
    return {
        "total_params": total,
        "active_params": total - layers * (stored - used),
        "forward_flops": 2 * multiplied * sequence + pairs,
        "kv_bytes_per_token": 2 * 2 * layers * kv_size,
        "training_bytes": 16 * total,
    }
    # END
