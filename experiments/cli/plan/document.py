"""The numbers of a plan as a JSON document, in SI units."""

from typing import Any

from experiments.cli.plan import find
from experiments.cli.plan.command import Options
from experiments.cli.plan.find import Found
from scaling.costs import parameters, serving
from scaling.laws import Optimum
from scaling.plan import Design
from scaling.shapes import HeadAttention


def describe(options: Options, found: Found) -> dict[str, Any]:
    """Gives every number of a plan."""
    case, best, spread = found.case, found.optimum, found.spread
    belief, train, whole = case.belief, found.training, case.bill(case.flops)
    number, duration_s = found.division
    return {
        "device": case.offer and case.offer.name,
        "devices": [
            offer._asdict()
            | {"flops_per_usd": offer.usd_per_hour and offer.flops_per_usd(case.mfu)}
            for offer in case.offers
        ],
        "mfu": case.mfu,
        "target_loss": case.target_loss,
        "flops": case.flops,
        "flops_interval": spread and spread.flops,
        "train_flops": train.flops,
        "serve_flops": 2 * best.num_params * options.inference_tokens,
        "law": belief.name,
        "fixed": {} if belief.fit is None else belief.fit.fixed,
        "formula": belief.law.formula,
        "coefficients": dict(belief.coefficients),
        "count": case.family.count,
        **best._asdict(),
        "interval": found.confidence,
        "prediction_interval": found.prediction,
        "num_params_interval": spread and spread.params,
        "num_tokens_interval": spread and spread.tokens,
        "level": case.level,
        "tokens_per_param": found.tokens_per_param,
        "num_params_searched": found.searched,
        "compute_optimum": _optimum(found.free),
        "inference_tokens": options.inference_tokens,
        "equal_loss": _equal_loss(found) if case.served else None,
        "num_unique_tokens": case.unique_tokens,
        "epochs": case.unique_tokens and max(1.0, best.num_tokens / case.unique_tokens),
        "architecture": _architecture(found),
        "exact_optimum": shape(found.exact[0])
        | {"num_tokens": found.exact[1], "loss": found.exact[2]},
        "cost_usd": whole.usd,
        "train_cost_usd": train.usd,
        "device_s": train.device_s,
        "serve_device_s": _serving_s(options, found),
        "num_devices": number,
        "duration_s": duration_s,
        "memory_bytes": found.memory.total,
        "warnings": [*find.warnings(found)],
    }


def _serving_s(options: Options, found: Found) -> float | None:
    """What of one device's time is left to serving."""
    whole, train = found.case.bill(found.case.flops), found.training
    if whole.device_s is None or train.device_s is None:
        return None
    left = max(whole.device_s - train.device_s, 0.0)
    return left if options.inference_tokens else 0.0


def _architecture(found: Found) -> dict[str, Any]:
    """Gives the nearest design: shape, exact counts, and what it takes to train."""
    design, train = found.design, found.exact_training
    return shape(design) | {
        "off": found.off,
        "train_flops": train.flops,
        "device_s": train.device_s,
        "cost_usd": train.usd,
        "num_tokens": found.design_tokens,
        "loss": found.design_loss,
        "memory_bytes": found.memory._asdict() | {"total": found.memory.total},
        "serving_bytes": 2 * parameters.parameters(design.model).total,
        "kv_bytes_per_token": serving.kv_bytes_per_token(design.model),
        "min_devices": found.min_devices,
    }


def config(design: Design) -> dict[str, Any]:
    """Gives a design as a Hugging Face `config.json`, which `jaxkv cost` reads."""
    has = shape(design)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": has["hidden_size"],
        "num_hidden_layers": has["num_layers"],
        "num_attention_heads": has["num_q_heads"],
        "num_key_value_heads": has["num_kv_heads"],
        "head_dim": has["head_dim"],
        "intermediate_size": has["mlp_size"],
        "vocab_size": has["vocab_size"],
        "max_position_embeddings": design.model.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": has["tie_embeddings"],
    }


def shape(design: Design) -> dict[str, Any]:
    """Gives the sizes of a design and its counts."""
    model, heads = design.model, design.model.attention
    assert isinstance(heads, HeadAttention)
    return {
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_q_heads": heads.num_q_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "mlp_size": model.mlp_size,
        "vocab_size": model.vocab_size,
        "tie_embeddings": model.tie_embeddings,
        "num_params": parameters.parameters(model)._asdict(),
        "train_flops_per_token": design.flops_per_token,
    }


def _optimum(optimum: Optimum) -> dict[str, float]:
    ratio = optimum.num_tokens / optimum.num_params
    return optimum._asdict() | {"tokens_per_param": ratio}


def _equal_loss(found: Found) -> dict[str, float]:
    """The cheapest to train and serve among models as good as the compute optimum."""
    return _optimum(found.equal) | {
        "flops": found.operations(found.equal),
        "flops_of_compute_optimum": found.operations(found.free),
        "saved": found.saved,
    }
