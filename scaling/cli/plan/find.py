"""Optimum, intervals and designs of `jaxkv plan`, as a document in SI units."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from scaling.cli.plan.options import PlanOptions
from scaling.costs import count_parameters, kv_bytes_per_token, training_memory
from scaling.laws import Optimum
from scaling.plan import (
    Design,
    OptimumSpread,
    PlanCase,
    allocate_budget,
    best_design,
    cheapest_model,
    lifetime_flops,
    loss_interval,
    max_vocab_size,
    nearest_design,
    optimum_spread,
    search_params,
)
from scaling.shapes import HeadAttention


def find_plan(options: PlanOptions, case: PlanCase) -> dict[str, Any]:
    """Computes the optimum, its intervals, and designs.

    Returns:
      The document; the report is derived from it.

    Raises:
      ValueError: the budget is too small or too large for any design.
    """
    loss_model = case.loss_model
    powers = case.loss_model.powers
    unique = case.unique_tokens
    free = allocate_budget(powers, case.flops)
    best = case.allocate()
    training_only = case._replace(served=0.0).allocate()
    family = case.family
    try:
        design = nearest_design(family, best.num_params)
    except ValueError as error:
        # Vocabularies that have small enough designs, or the origin of this one.
        size = family.vocab_size
        way_out = ""
        max_vocab = max_vocab_size(family, best.num_params)
        if max_vocab is not None and 1 <= max_vocab < size:
            way_out = (
                f"; with --vocab-size in [1, {max_vocab:,}] there are smaller designs"
            )
            if size == loss_model.shape.get("vocab_size"):
                way_out = f", that of the runs of {loss_model.name}"
        raise _refusal(case, error, way_out) from None
    try:  # with exact operation counts
        other, tokens, loss = best_design(
            family, case.loss, case.flops, inference_tokens=case.served
        )
    except ValueError as error:
        raise _refusal(case, error, "; a smaller --sequence might do") from None
    sure = optimum_spread(case, best)
    train = case.bill(6 * best.num_params * best.num_tokens)
    total_bill, (number, duration_s) = (
        case.bill(case.flops),
        case.division(train.device_s),
    )
    document = {
        "device": case.offer and case.offer.name,
        "offers": [
            offer._asdict()
            | {"flops_per_usd": offer.usd_per_hour and offer.flops_per_usd(case.mfu)}
            for offer in case.offers
        ],
        "mfu": case.mfu,
        "target_loss": case.target_loss,
        "flops": case.flops,
        "flops_interval": sure and sure.flops,
        "train_flops": train.flops,
        "serve_flops": 2 * best.num_params * options.inference_tokens,
        "law": loss_model.name,
        "fixed": {} if loss_model.fit is None else loss_model.fit.fixed,
        "formula": loss_model.law.formula,
        "coefficients": dict(loss_model.coefficients),
        "count": case.family.count,
        **best._asdict(),
        "interval": loss_interval(case, best, "confidence"),
        "prediction_interval": loss_interval(case, best, "prediction"),
        "num_params_interval": sure and sure.params,
        "num_tokens_interval": sure and sure.tokens,
        "optimum_loss_interval": sure and sure.loss,
        "extrapolation": extrapolation_ratio(case, train.flops),
        "level": case.level,
        "tokens_per_param": best.num_tokens / best.num_params,
        "num_params_searched": search_params(
            powers, case.flops, case.served, case.repeating
        ),
        "compute_optimum": to_optimum(free),
        "inference_tokens": options.inference_tokens,
        "training_optimum": to_optimum(training_only),
        "equal_loss": _equal_loss(case, training_only) if case.served else None,
        "num_unique_tokens": unique,
        "epochs": unique and max(1.0, best.num_tokens / unique),
        "architecture": design_document(case, best, design),
        "exact_optimum": _shape(other) | {"num_tokens": tokens, "loss": loss},
        "cost_usd": total_bill.usd,
        "cost_usd_interval": sure
        and sure.flops
        and total_bill.usd
        and tuple(x / case.flops * total_bill.usd for x in sure.flops),
        "training_usd": train.usd,
        "serving_usd": None,
        "devices": None,
        "device_s": train.device_s,
        "serve_device_s": None,
        "num_devices": number,
        "duration_s": duration_s,
    }
    if total_bill.device_s is not None and train.device_s is not None:
        left = max(total_bill.device_s - train.device_s, 0.0)
        document["serve_device_s"] = left if options.inference_tokens else 0.0
    if total_bill.usd is not None and train.usd is not None:
        document["serving_usd"] = max(total_bill.usd - train.usd, 0.0)
    document["memory_bytes"] = document["architecture"]["memory_bytes"]["total"]
    document["warnings"] = [*_warnings(case, document, sure)]
    return document


def _refusal(case: PlanCase, error: ValueError, way_out: str) -> ValueError:
    limits = ""
    if case.unique_tokens is not None:
        limits += f" and {case.unique_tokens:.4g} unique tokens"
    if case.served:
        limits += f" with {case.served:.4g} tokens to serve"
    target = case.target_loss
    aim = "" if target is None else f"--target-loss {target:g}: "
    message = f"a budget of {case.flops:.4g} FLOPs{limits} is {error}{way_out}"
    return ValueError(aim + message)


def design_document(case: PlanCase, best: Optimum, design: Design) -> dict[str, Any]:
    """Returns the nearest design: shape, exact counts, and training costs."""
    model = design.model
    offer = case.offer
    sequence = case.family.sequence
    memory = training_memory(model, sequence=sequence, checkpointing="boundary")
    train = case.bill(design.flops_per_token * best.num_tokens)
    # Training tokens within the budget; 0 if serving takes the whole budget.
    tokens = max(case.flops / design.flops_per_token - case.served / 3, 0.0)
    needed = None
    if offer is not None and offer.memory_bytes is not None:
        needed = math.ceil(memory.total / offer.memory_bytes)
    return _shape(design) | {
        "off": design.num_params / best.num_params - 1,
        "train_flops": train.flops,
        "device_s": train.device_s,
        "cost_usd": train.usd,
        "num_tokens": tokens,
        "loss": float(case.loss(float(design.num_params), tokens)) if tokens else None,
        "memory_bytes": memory._asdict() | {"total": memory.total},
        "serving_bytes": 2 * count_parameters(model).total,
        "kv_bytes_per_token": kv_bytes_per_token(model),
        "min_devices": needed,
    }


def _shape(design: Design) -> dict[str, Any]:
    model = design.model
    heads = design.model.attention
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
        "num_params": count_parameters(model)._asdict(),
        "train_flops_per_token": design.flops_per_token,
    }


def to_architecture_config(
    case: PlanCase, shape: Mapping[str, object]
) -> dict[str, object]:
    """Gives a design as a Hugging Face `config.json`, which `jaxkv cost` reads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden_size"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_q_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_dim"],
        "intermediate_size": shape["mlp_size"],
        "vocab_size": shape["vocab_size"],
        "max_position_embeddings": case.family.sequence,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape["tie_embeddings"],
    }


def to_optimum(optimum: Optimum) -> dict[str, float]:
    """Returns N, D, loss and tokens per parameter."""
    ratio = optimum.num_tokens / optimum.num_params
    return optimum._asdict() | {"tokens_per_param": ratio}


def _equal_loss(case: PlanCase, training_only: Optimum) -> dict[str, float]:
    """Returns the cheapest model to train and serve at the loss of another design.

    Args:
      case: case with tokens to serve.
      training_only: best design if training takes the whole budget, under the same
        limit on unique tokens.
    """
    served = case.served
    target = training_only.loss
    equal = cheapest_model(
        case.loss_model.powers,
        target,
        inference_tokens=served,
        repeating=case.repeating,
    )
    flops, usual = (
        lifetime_flops(x.num_params, x.num_tokens, served)
        for x in (equal, training_only)
    )
    return to_optimum(equal) | {
        "flops": flops,
        "flops_of_compute_optimum": usual,
        "saved": 1 - flops / usual,
    }


_FAR = 10.0
"""Extrapolation ratio from which a plan has a warning."""
_VERY_FAR = 100.0
"""Extrapolation ratio that no public log measures: forecasts there reach 10 to 30."""


def extrapolation_ratio(case: PlanCase, train_flops: float) -> float | None:
    """Returns FLOPs of training over those of the largest fitted run, if known."""
    fit = case.loss_model.fit
    if fit is None or "flops" not in fit.ranges:
        return None
    return train_flops / fit.ranges["flops"][1]


def fit_warnings(case: PlanCase, train_flops: float) -> Iterator[str]:
    """Yields warnings about the fit of the law, none for published constants."""
    loss_model = case.loss_model
    if (fit := loss_model.fit) is None:
        return
    yield from loss_model.doubts
    yield from (f"{loss_model.law.name}: {line}" for line in fit.warnings)
    ratio = extrapolation_ratio(case, train_flops)
    if ratio is not None and ratio > _FAR:
        beyond = f"; beyond {_VERY_FAR:g} times intervals hold no promise"
        yield (
            f"training takes {ratio:,.3g} times the operations of the largest run that "
            f"was fitted{beyond if ratio > _VERY_FAR else ''}"
        )


def _warnings(
    case: PlanCase, document: dict[str, Any], sure: OptimumSpread | None
) -> Iterator[str]:
    """Yields warnings about a plan."""
    loss_model = case.loss_model
    fit = case.loss_model.fit
    shape = document["architecture"]
    yield from fit_warnings(case, document["train_flops"])
    if sure is not None and sure.num_without:
        yield (
            f"{sure.num_without} of {sure.num_resamples} resamples "
            "have no optimum: the intervals of N and D are without them"
        )
    if case.target_loss is not None and fit is not None:
        if sure is None:
            why = "the fit has no resamples (fit --bootstrap)"
            yield f"the budget has no interval: {why}"
        elif sure.flops is not None and math.isinf(sure.flops[1]):
            yield (
                f"in some resamples no budget reaches a loss of {case.target_loss:g}: "
                "the loss may be below the floor"
            )
    if loss_model.count and case.family.count != loss_model.count:
        yield (
            f"the fit counted {loss_model.count} parameters, "
            f"--count is {case.family.count}"
        )
    if case.unique_tokens is not None:
        half = case._replace(flops=case.flops / 2).allocate()
        if half.loss - document["loss"] < 1e-3 * (half.loss - loss_model.powers.floor):
            yield (
                "the data is exhausted: half of the budget would reach a loss of "
                f"{half.loss:.4f}, all of it {document['loss']:.4f}"
            )
    if abs(shape["off"]) > 0.01:
        yield f"the nearest design is {100 * shape['off']:+.1f} % off in parameters"
    number, _ = case.division(case.bill(case.flops).device_s)
    needed = shape["min_devices"]
    if number is not None and needed is not None and number < needed:
        yield (
            f"{number} devices cannot hold a training step: it needs {needed} at least"
        )
    if shape["num_tokens"] == 0:
        yield "with every operation counted, serving takes the whole budget"
