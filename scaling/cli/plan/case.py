"""Resolves the options of `jaxkv plan`: law, offers, and budget."""

import contextlib
import difflib
import json
import math
import os
from pathlib import Path
from typing import Any, get_args

from jaxkv.validation import format_unknown_name
from scaling.cli.plan.options import MAX_VALUE, PlanOptions
from scaling.costs import find_device
from scaling.fits import from_json
from scaling.laws import CHINCHILLA, CONSTANTS, LAWS
from scaling.logs import read_log_text
from scaling.plan import (
    DAY_S,
    Count,
    DesignFamily,
    LossModel,
    Offer,
    PlanCase,
    best_offer,
    make_loss_model,
    parse_offer,
)

USUAL = {"vocab_size": 32_000, "sequence": 4096}
"""Defaults of architectures, if neither the options nor a sweep give values."""
_SHAPE_FIELDS = {"vocab_size": int, "sequence": int, "tie_embeddings": bool}


def resolve_plan_case(options: PlanOptions) -> PlanCase:
    """Reads the law and the offers, selects the device, and computes the budget."""
    try:
        offers = tuple(map(parse_offer, options.gpu))
    except ValueError as error:
        raise ValueError(f"--gpu {error}") from None
    flops = _flops(options, best_offer(offers, options.mfu) if offers else None)
    loss_model = read_law(options.law, options.group)
    served = options.inference_tokens
    if options.serve_mfu is not None:
        served *= options.mfu / options.serve_mfu
    if served > MAX_VALUE:
        raise ValueError(
            f"serving takes {served:.4g} tokens' worth: must be at most {MAX_VALUE:g}"
        )
    # Properties of architectures: the options, or else those of the fitted runs.
    shape_options = {name: getattr(options, name) for name in USUAL}
    overrides = {
        name: value for name, value in shape_options.items() if value is not None
    }
    shared: dict[str, Any] = {**USUAL, **loss_model.shape, **overrides}
    if options.tie_embeddings:
        shared["tie_embeddings"] = True
    count = options.count or loss_model.count or "total"
    case = PlanCase(
        loss_model=loss_model,
        family=DesignFamily(
            **shared,
            count=count,
            attention=options.attention,
            kv_heads=options.kv_heads,
        ),
        offers=offers,
        flops=flops,
        mfu=options.mfu,
        served=served,
        unique_tokens=options.unique_tokens,
        target_loss=options.target_loss,
        days=options.days,
        devices=options.devices,
        level=options.level,
    )
    if case.target_loss is not None:
        try:
            case = case._replace(flops=case.needed())
        except ValueError as error:
            raise ValueError(
                f"--target-loss {case.target_loss:g} by {loss_model.name}: {error}"
            ) from None
    if case.flops > MAX_VALUE:
        line = f"a budget of {case.flops:.4g} FLOPs is too large for any design"
        raise ValueError(line)
    return case


def read_law(name: str, group: str | None = None) -> LossModel:
    """Returns published constants by name, or reads a fit.

    Args:
      name: name of the constants, or path of a fit.json or of a folder with one.
      group: group of the fit, for a log that was fitted by groups.

    Raises:
      ValueError: the law does not exist, or has no compute optimum.
    """
    path = Path(name)
    if group is not None and (name in CONSTANTS or not path.exists()):
        raise ValueError(f"--group {group}: --law {name} is not a fit of groups")
    if name in CONSTANTS:
        return make_loss_model(name, CHINCHILLA, CONSTANTS[name])
    if not path.exists():
        raise ValueError(f"--law {name}{_unknown_law(name)}")
    path = path / "fit.json" if path.is_dir() else path
    try:
        return _read_fit(path, group)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--law {path}: {error}") from None


def _read_fit(path: Path, group: str | None) -> LossModel:
    try:
        document = json.loads(read_log_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not a fit.json, as `jaxkv fit LOG --out DIR` writes it: {error}"
        ) from None
    except RecursionError:
        raise ValueError("not a fit.json: nested too deeply") from None
    document = _of_group(document, group)
    fit = from_json(document)
    loss_model = make_loss_model(str(path), fit.find_law(), fit.coefficients)
    if not {"num_params", "num_tokens"} <= {*fit.inputs}:
        raise ValueError(
            f"the fit has inputs {', '.join(fit.inputs)}; N and D are needed"
        )
    count = document.get("count")
    shape = document.get("shape", {})
    if not isinstance(shape, dict) or any(
        type(shape[name]) is not _SHAPE_FIELDS.get(name) for name in shape
    ):
        raise ValueError(f"{shape=} must hold numbers of {[*_SHAPE_FIELDS]}")
    doubts = document.get("log_warnings", [])
    if not isinstance(doubts, list) or not all(isinstance(x, str) for x in doubts):
        raise ValueError("log_warnings must be sentences")
    if document.get("by"):
        loss_model = loss_model._replace(
            name=f"{path} ({document['by']} {document['group']})"
        )
    conventions = get_args(Count.__value__)
    return loss_model._replace(
        fit=fit,
        count=count if count in conventions else None,
        doubts=tuple(doubts),
        shape=shape,
    )


def _unknown_law(name: str) -> str:
    """Returns the message for an unknown law, with similar laws or files."""
    if name in LAWS:
        return (
            " has no published constants here: fit it with `jaxkv fit`, or take one "
            f"of: {', '.join(CONSTANTS)}"
        )
    path = Path(name)
    is_path = "/" in name or name.endswith(".json")
    names = [] if is_path else [*CONSTANTS, *LAWS]
    with contextlib.suppress(OSError):
        names += [str(path.parent / x) for x in os.listdir(path.parent)]
    line = f": {'' if is_path else f'unknown law {name!r}, '}no such file or folder"
    if near := difflib.get_close_matches(name, names):
        return f"{line}; did you mean {' or '.join(near)}?"
    return line if is_path else f"{line}; one of: {', '.join(CONSTANTS)}"


def _of_group(document: object, group: str | None) -> Any:
    """Selects the fit of a group, for a log that was fitted by groups.

    Raises:
      ValueError: there are several groups and none was selected, or it does not exist.
    """
    if not isinstance(document, dict) or not document.get("by"):
        if group is not None:
            raise ValueError(f"--group {group}: not a fit of groups (fit --by)")
        return document
    fits = [document, *document.get("others", [])]
    by_group: dict[str, dict[str, object]] = {}
    for fit in fits:
        by_group.setdefault(str(fit.get("group")), fit)
    names = [*by_group]
    if group is None and len(names) > 1:
        raise ValueError(
            f"it has a law for each {document['by']}; give --group, one of: "
            f"{', '.join(names)}"
        )
    if group is not None and group not in names:
        raise ValueError(format_unknown_name("--group", group, names))
    return document | by_group[names[0] if group is None else group]


def _flops(options: PlanOptions, offer: Offer | None) -> float:
    """Returns the budget in operations; NaN if it follows from the law."""
    both_times = options.days is not None and options.devices is not None
    is_set = {
        "--budget-usd": options.budget_usd is not None,
        "--budget-joules": options.budget_joules is not None,
        "--flops": options.flops is not None,
        "--days with --devices": both_times,
        "--target-loss": options.target_loss is not None,
    }
    names = [name for name, is_given in is_set.items() if is_given]
    if not names:
        raise ValueError(f"a budget is missing; one of: {', '.join(is_set)}")
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)}: give exactly one budget")
    if options.flops is not None or options.target_loss is not None:
        return math.nan if options.flops is None else options.flops
    if offer is None:
        raise ValueError(f"{names[0]} needs --gpu NAME:USD_PER_HOUR:TFLOPS")
    if options.budget_usd is not None:
        return options.budget_usd * offer.flops_per_usd(options.mfu)
    if options.budget_joules is not None:
        # jax takes a second to import.
        from scaling.calibration import predict_training_watts

        watts = predict_training_watts(find_device(offer.name), options.mfu)
        if not watts:
            raise ValueError(f"--budget-joules: the power of {offer.name} is unknown")
        return options.budget_joules * offer.flops_per_s * options.mfu / watts
    assert options.days is not None
    assert options.devices is not None
    seconds = options.days * DAY_S * options.devices
    return seconds * offer.flops_per_s * options.mfu
