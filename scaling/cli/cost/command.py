"""Costs of a model: `jaxkv cost MODEL` prints numbers, tables, answers and a figure.

The command reads a model description and evaluates formulas of `scaling`; it does not
import JAX, so it answers within a second.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxkv import report
from jaxkv.cli import CommandOutput, describe_default, parse_subject
from jaxkv.files import bundled_models, model_folder
from jaxkv.validation import ConfigRecord, Range, format_unknown_name
from scaling import costs, shapes
from scaling.cli.cost import answers as cost_answers
from scaling.cli.cost import device_tables, drawing, tables
from scaling.cli.cost.case import CostCase
from scaling.costs import (
    ServingWork,
    check_layout,
    count_parameters,
    decode_terms,
    decode_work,
    find_device,
    forward_terms,
    kv_bytes_per_token,
    list_weights,
    parse_layout,
    place_counts,
    prefill_work,
    sequence_kv_bytes,
    sequence_state_bytes,
    training_memory,
    training_step_flops,
    training_traffic,
)
from scaling.shapes import CONFIGS, SHAPES, ModelShape, load_shape

MAX_BATCH_TOKENS = 2**40
DEFAULT_SEQUENCE = 4096
"""Default tokens of a sequence, if the model supports as many."""


class CostOptions(ConfigRecord):
    """Settings of the formulas."""

    batch: Annotated[int, Range(1, MAX_BATCH_TOKENS)] = 1
    """Sequences b: of a training micro-batch, and of a serving step."""
    sequence: Annotated[
        int | None,
        Range(1, MAX_BATCH_TOKENS),
        describe_default("4096, or as many as the model takes"),
    ] = None
    """Tokens s of each sequence."""
    device: str = "a100-80gb"
    """Accelerator of the roofline."""
    parallel: str = ""
    """Parallel layout, such as tp=8,sp,pp=2,dp=4,ep=8,ulysses=8,ring=8."""
    zero: int = 0
    """ZeRO stage: 1 shards the optimizer, 2 also gradients, 3 also weights."""
    dtype: Literal["bfloat16", "float32", "float8"] = "bfloat16"
    """Type of weights, keys and values. Training: 16 bits with a float32 master copy
    and Adam's moments, or float32 only."""
    weights: Literal["model", "int8", "fp8", "mxfp4", "nvfp4"] = "model"
    """Format of the weights of the layers' products in serving; model means --dtype."""
    checkpoint: Literal["none", "selective", "full", "boundary"] = "none"
    """Tensors kept in training: all; all but attention weights; layer inputs; layer
    inputs and one recomputed layer."""
    attention: Literal["full", "causal"] = "full"
    """Pairs of query and key that are counted: all, or half."""
    flash: bool = True
    """Tiled attention, which keeps no attention weights."""
    dropout: bool = False
    """Dropout in training, with stored masks."""
    plot: bool = False
    """Draw the breakdown and the roofline."""
    out: Annotated[
        Path | None, describe_default("none, with --plot a new one under runs/")
    ] = None
    """Folder for cost.json and the figure."""


def main(args: list[str]) -> CommandOutput:
    """Runs `cost MODEL [OPTIONS]`."""
    names = list_models()
    request = parse_subject(
        args,
        CostOptions,
        "jaxkv cost MODEL",
        f"MODEL is missing: a config.json, a folder, or {names}",
        f"MODEL is a config.json, a folder with one, or {names}.",
    )
    return count_costs(*request)


def count_costs(name: str, options: CostOptions) -> CommandOutput:
    """Runs `jaxkv cost`.

    Args:
      name: published model, bundled model, `config.json`, or a folder with one.
      options: settings of the formulas.

    Raises:
      ValueError: the model or device is unknown, or a size or degree does not fit.
    """
    case = resolve_case(name, options)
    answers = cost_answers.answer_questions(case)
    document = to_document(case)
    sheets = tables.cost_sheets(case, document)
    document["answers"] = [{"question": x, "answer": y} for x, y in answers]
    lines = []
    if options.zero and case.layout.copies == 1:
        lines.append(
            f"--zero {options.zero} has no effect with one replica (dp=2 makes two)"
        )
    if case.layout.pages > 1:
        lines.append(
            f"cp={case.layout.pages} divides the pages of an engine: numbers of "
            "training are without it"
        )
    document["notes"] = [*lines]
    if options.plot or options.out is not None:
        from jaxkv.report import write_files

        contents: dict[str, str | bytes] = {"cost.json": report.dumps(document)}
        if options.plot:
            contents |= drawing.render_cost_figure(case)
        document["out"] = write_files(options.out, f"cost-{case.model.name}", contents)
        lines.append(f"folder: {document['out']}")
    paragraphs = [report.paragraph(*pair) for pair in answers]
    return CommandOutput(document, [*sheets, *paragraphs], lines)


def resolve_case(name: str, options: CostOptions) -> CostCase:
    """Looks up the model and the device, and validates all sizes."""
    model = find_description(name)
    max_sequence = model.max_positions or DEFAULT_SEQUENCE
    sequence = options.sequence or min(DEFAULT_SEQUENCE, max_sequence)
    if model.position_rows and model.max_positions and sequence > model.max_positions:
        raise ValueError(
            f"sequence={sequence} must be at most {model.max_positions}, the positions "
            f"that {model.name} has"
        )
    layout = parse_layout(options.parallel, zero=options.zero)
    check_layout(model, layout, sequence=sequence)
    device = find_device(options.device)
    device.rate(options.dtype)
    return CostCase(
        model=model,
        batch=options.batch,
        sequence=sequence,
        device=device,
        layout=layout,
        dtype=options.dtype,
        checkpointing=options.checkpoint,
        attention=options.attention,
        flash=options.flash,
        dropout=options.dropout,
        weights=options.weights,
    )


def find_description(name: str) -> ModelShape:
    """Returns a model description by path, published name, or bundled name.

    A published name may be that of a checkpoint, such as `mistralai/Mixtral-8x7B-v0.1`.

    Raises:
      ValueError: the model is unknown, or its file describes an unsupported model.
    """
    if Path(name).exists():
        return load_shape(Path(name))
    if name in CONFIGS:
        return shapes.describe(name)
    if name in bundled_models():
        return load_shape(model_folder(name))
    with contextlib.suppress(ValueError):  # the message below has close names
        return shapes.describe_checkpoint(name)
    if "/" in name or name.endswith(".json"):
        raise ValueError(f"{name}: no such file or folder")
    names = [*CONFIGS, *SHAPES, *bundled_models()]
    line = format_unknown_name("model", name, names)
    raise ValueError(f"{name}: no such file or folder, and {line}")


def list_models() -> str:
    """Returns the models that are known by name, as text."""
    return f"one of: {', '.join([*CONFIGS, *SHAPES, *bundled_models()])}"


def to_document(case: CostCase) -> dict[str, Any]:
    """Returns all numbers as a JSON document."""
    model = case.model
    tokens = case.batch * case.sequence
    step = case.evaluate(training_step_flops)
    params = count_parameters(model)
    memory: dict[str, float] = {}
    training: dict[str, Any] = {}
    if case.has_activations:
        terms = case.evaluate(training_memory)
        sums = {"model_state": terms.model_state, "total": terms.total}
        memory = terms._asdict() | sums
        training = {
            "activation_bytes_per_token": {
                f"{x.part}: {x.name}": x.bytes for x in case.stored
            },
            "one_layer": tables.one_layer(case),
        }
    places = place_counts(model)
    decode = case.evaluate(decode_work)
    prefill = case.evaluate(prefill_work)
    schemes: dict[str, dict[str, float]] = {}
    for traffic in case.evaluate(training_traffic):
        scheme = schemes.setdefault(traffic.scheme, {"forward": 0.0, "backward": 0.0})
        scheme["forward"] += traffic.forward
        scheme["backward"] += traffic.backward
    terms = {
        "forward": case.evaluate(forward_terms),
        "prefill": case.evaluate(forward_terms, logits="last"),
        "decode": case.evaluate(decode_terms),
    }
    return {
        "model": model.name,
        "symbols": {letter: value for letter, value, _ in tables.symbols(case)},
        "num_params": params._asdict(),
        "params_by_weight": {
            f"{x.part}: {x.name}": x.size * x.stored * places[x.place]
            for x in list_weights(model)
            if x.place != "ahead"
        },
        "flops": {
            "attention": case.attention,
            "forward_per_token": _divided(step.forward, tokens),
            "train_per_token": _divided(step.model, tokens),
            "decode_per_token": _divided(int(decode.flops), case.batch),
            **step._asdict(),
            "terms": {
                name: {f"{x.part}: {x.name}": x.flops for x in part_terms}
                for name, part_terms in terms.items()
            },
        },
        "memory_bytes": memory | {"serving_weights": params.total * case.number_bytes},
        **training,
        "kv_bytes_per_token": case.evaluate(kv_bytes_per_token),
        "kv_bytes_per_sequence": case.evaluate(sequence_kv_bytes, tokens=case.sequence),
        "state_bytes_per_sequence": case.evaluate(sequence_state_bytes),
        "comms_bytes": schemes,
        "num_devices": case.layout.num_devices,
        "per_device": device_tables.per_device(case),
        "device": case.device.name,
        "decode": _served(case, decode),
        "prefill": _served(case, prefill),
    }


def _divided(total: int, tokens: int) -> int | float:
    return total // tokens if total % tokens == 0 else total / tokens


def _served(case: CostCase, work: ServingWork) -> dict[str, object]:
    return {
        **work._asdict(),
        "intensity": work.intensity,
        "ridge": case.ridge,
        **case.evaluate(costs.roofline, work=work)._asdict(),
    }
