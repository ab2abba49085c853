"""The numbers of a plan as a JSON document, in SI units."""

from typing import Any

from experiments.cli.plan import find
from experiments.cli.plan.case import Case, device_seconds, division, price
from experiments.cli.plan.find import Found
from scaling.costs import parameters, serving
from scaling.laws import Optimum
from scaling.plan import Design
from scaling.shapes import Description, HeadAttention


def describe(case: Case, found: Found) -> dict[str, Any]:
    """Gives every number of a plan."""
    options, belief, best = case.options, case.belief, found.optimum
    train_flops = 6 * best.num_params * best.num_tokens
    device_s = device_seconds(case, train_flops)
    number, duration_s = division(case, device_s)
    whole_s = device_seconds(case, case.flops)
    return {
        "device": None if case.offer is None else case.offer.name,
        "devices": [
            offer._asdict()
            | {
                "flops_per_usd": None
                if offer.usd_per_hour is None
                else offer.flops_per_usd(options.mfu)
            }
            for offer in case.offers
        ],
        "mfu": options.mfu,
        "target_loss": options.target_loss,
        "flops": case.flops,
        "flops_interval": None if found.spread is None else found.spread.flops,
        "train_flops": train_flops,
        "serve_flops": 2 * best.num_params * options.inference_tokens,
        "law": belief.name,
        "fixed": {} if belief.fit is None else belief.fit.fixed,
        "formula": belief.law.formula,
        "coefficients": dict(belief.coefficients),
        "count": case.family.count,
        "num_params": best.num_params,
        "num_tokens": best.num_tokens,
        "loss": best.loss,
        "interval": found.confidence,
        "prediction_interval": found.prediction,
        "num_params_interval": None if found.spread is None else found.spread.params,
        "num_tokens_interval": None if found.spread is None else found.spread.tokens,
        "level": options.level,
        "tokens_per_param": best.num_tokens / best.num_params,
        "num_params_searched": found.searched,
        "compute_optimum": _optimum(found.free),
        "inference_tokens": options.inference_tokens,
        "equal_loss": _equal_loss(case, found),
        "num_unique_tokens": options.unique_tokens,
        "epochs": None
        if options.unique_tokens is None
        else max(1.0, best.num_tokens / options.unique_tokens),
        "architecture": architecture(case, found),
        "exact_optimum": _shape(found.exact[0])
        | {"num_tokens": found.exact[1], "loss": found.exact[2]},
        "cost_usd": price(case, whole_s),
        "train_cost_usd": price(case, device_s),
        "device_s": device_s,
        "serve_device_s": None
        if whole_s is None or device_s is None
        else max(whole_s - device_s, 0.0)
        if options.inference_tokens
        else 0.0,
        "num_devices": number,
        "duration_s": duration_s,
        "memory_bytes": found.memory.total,
        "warnings": found.warnings,
    }


def architecture(case: Case, found: Found) -> dict[str, Any]:
    """Gives the nearest design: shape, exact counts, and what it takes to train."""
    design, best = found.design, found.optimum
    train_flops = design.flops_per_token * best.num_tokens
    device_s = device_seconds(case, train_flops)
    tokens = found.design_tokens
    return _shape(design) | {
        "off": design.num_params / best.num_params - 1,
        "train_flops": train_flops,
        "device_s": device_s,
        "cost_usd": price(case, device_s),
        "num_tokens": tokens,
        "loss": float(case.loss(float(design.num_params), tokens)) if tokens else None,
        "memory_bytes": found.memory._asdict() | {"total": found.memory.total},
        "serving_bytes": 2 * parameters.parameters(design.model).total,
        "kv_bytes_per_token": serving.kv_bytes_per_token(design.model),
        "min_devices": find.min_devices(case, found),
    }


def config(model: Description) -> dict[str, Any]:
    """Gives a design as a Hugging Face `config.json`, which `jaxkv cost` reads."""
    heads = model.attention
    assert isinstance(heads, HeadAttention)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads.num_q_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "intermediate_size": model.mlp_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _shape(design: Design) -> dict[str, Any]:
    model = design.model
    heads = model.attention
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


def _equal_loss(case: Case, found: Found) -> dict[str, float] | None:
    """The cheapest to train and serve among models as good as the compute optimum."""
    if not case.served:
        return None
    flops, usual = (
        x.num_params * (6 * x.num_tokens + 2 * case.served)
        for x in (found.equal, found.free)
    )
    return _optimum(found.equal) | {
        "flops": flops,
        "flops_of_compute_optimum": usual,
        "saved": 1 - flops / usual,
    }
