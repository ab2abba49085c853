"""What does a model cost? `jaxkv cost MODEL`: its numbers, tables, words and figure.

Reads a description and asks `scaling` for everything; JAX stays asleep, so that the
answer is there in a second.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from experiments.cli import parsing
from experiments.cli.cost import answers as cost_answers
from experiments.cli.cost import device_tables, tables
from experiments.cli.cost.answers import sheets
from experiments.cli.run import Answer
from experiments.framework import config_json
from experiments.harness import bundled
from scaling.costs import (
    Device,
    Layout,
    activations,
    devices,
    flops,
    parallelism,
    parameters,
    serving,
)
from scaling.costs import memory as costs_memory
from scaling.costs import traffic as costs_traffic
from scaling.costs.memory import MIXED, SINGLE, Bytes, Memory
from scaling.costs.traffic import Traffic
from scaling.shapes import Description, huggingface, published

MAX_TOKENS = 2**40
DEFAULT_SEQUENCE = 4096
"""Tokens of a sequence where nothing is said, if the model takes as many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the costs are asked for."""

    batch: int = 1
    """Sequences b: of a training micro-batch, and of a step of serving."""
    sequence: Annotated[
        int | None, parsing.without("4096, or as many as the model takes")
    ] = None
    """Tokens s of each."""
    device: str = "a100-80gb"
    """The accelerator of the roofline."""
    parallel: str = ""
    """How the model is divided, such as tp=8,sp,pp=2,dp=4,ep=8,ulysses=8,ring=8."""
    zero: int = 0
    """What copies divide: 1 optimizer, 2 also gradients, 3 also weights."""
    dtype: Literal["bfloat16", "float32", "float8"] = "bfloat16"
    """Of weights, keys and values. Training: 16 bits with a float32 master copy and
    Adam's moments, or float32 alone."""
    checkpoint: Literal["none", "selective", "full", "boundary"] = "none"
    """What training keeps: all; all but attention's weights; layer inputs; these and
    one layer that is computed again."""
    attention: Literal["full", "causal"] = "full"
    """Whether pairs of query and key are all counted, or half."""
    flash: bool = True
    """Whether attention works in tiles and keeps no weights."""
    dropout: bool = False
    """Whether training drops out, and keeps the masks."""
    plot: bool = False
    """Draw the breakdown and the roofline."""
    out: Annotated[
        Path | None, parsing.without("none, with --plot a new one under runs/")
    ] = None
    """Folder for cost.json and the figure."""

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be."""
        for name in ("batch", "sequence"):
            if (value := getattr(self, name)) is None:
                continue
            if not 1 <= value <= MAX_TOKENS:
                raise ValueError(f"{name}={value} must be in [1, {MAX_TOKENS}]")


class Case(NamedTuple):
    """A model and what it is asked for, looked up and checked.

    Attributes:
      model: its shape.
      batch: sequences.
      sequence: tokens of each.
      device: the accelerator.
      layout: how the model is divided.
      weight_bytes: of a weight, and of a number of K or V, when serving.
      bytes_per_param: of weights, gradients and optimizer when training.
      options: what was asked.
    """

    model: Description
    batch: int
    sequence: int
    device: Device
    layout: Layout
    weight_bytes: int
    bytes_per_param: Bytes
    options: Options

    def memory(self, **change: Any) -> Memory:
        """Training memory of the fullest device, with other settings if given."""
        how: dict[str, Any] = {
            "batch": self.batch,
            "sequence": self.sequence,
            "layout": self.layout,
            "bytes_per_param": self.bytes_per_param,
            "checkpointing": self.options.checkpoint,
            "flash": self.options.flash,
            "dropout": self.options.dropout,
        }
        return costs_memory.training(self.model, **how | change)

    def training(self, **change: Any) -> flops.Training:
        """Operations of a training step of the batch, on all devices together."""
        how: dict[str, Any] = {
            "batch": self.batch,
            "sequence": self.sequence,
            "attention": self.options.attention,
            "checkpointing": self.options.checkpoint,
        }
        return flops.training(self.model, **how | change)

    def forward(self) -> tuple[flops.Term, ...]:
        """Products of a forward pass over the batch."""
        return flops.forward(
            self.model,
            batch=self.batch,
            sequence=self.sequence,
            attention=self.options.attention,
        )

    def stored(self) -> tuple[activations.Stored, ...]:
        """Tensors that a layer keeps for the backward pass."""
        return activations.stored(
            self.model,
            sequence=self.sequence,
            flash=self.options.flash,
            dropout=self.options.dropout,
            number_bytes=self.bytes_per_param.weight,
        )

    def decode_terms(self) -> tuple[flops.Term, ...]:
        """Products of a step of decoding."""
        return flops.decode(self.model, batch=self.batch, context=self.sequence)

    def prefill_terms(self) -> tuple[flops.Term, ...]:
        """Products of reading prompts, with the logits of each last token."""
        return flops.forward(
            self.model,
            batch=self.batch,
            sequence=self.sequence,
            attention=self.options.attention,
            logits="last",
        )

    def decode(self, batch: int | None = None) -> serving.Work:
        """A step of decoding with `sequence` tokens kept of each."""
        return serving.decode(
            self.model,
            batch=batch or self.batch,
            context=self.sequence,
            weight_bytes=self.weight_bytes,
            kv_bytes=self.weight_bytes,
        )

    def prefill(self, prompt: int | None = None) -> serving.Work:
        """Reading prompts of `sequence` tokens."""
        return serving.prefill(
            self.model,
            batch=self.batch,
            prompt=prompt or self.sequence,
            attention=self.options.attention,
            weight_bytes=self.weight_bytes,
            kv_bytes=self.weight_bytes,
        )

    def roofline(self, work: serving.Work) -> serving.Roofline:
        """Its time on the devices that share one copy of the model, none waiting."""
        return serving.roofline(
            work,
            self.device,
            precision=self.options.dtype,
            num_devices=self.layout.sharing,
        )

    def traffic(self) -> tuple[Traffic, ...]:
        """What a device sends in a training step."""
        return costs_traffic.training(
            self.model, self.layout, batch=self.batch, sequence=self.sequence
        )


def cost(name: str, options: Options) -> Answer:
    """Answers `jaxkv cost`.

    Args:
      name: a published model, a bundled one, a `config.json` or a folder with one.
      options: what is asked.

    Raises:
      ValueError: there is no such model or device, or a size or degree does not fit.
    """
    case = look_up(name, options)
    answers = cost_answers.answers(case)
    document = describe(case) | {
        "answers": [{"question": x, "answer": y} for x, y in answers]
    }
    parts = [*tables.sheets(case), *sheets(answers)]
    lines = []
    if options.zero and case.layout.copies == 1:
        lines.append(
            f"--zero {options.zero} divides nothing: there is one copy (dp=2 makes two)"
        )
    document["notes"] = [*lines]
    if options.plot or options.out is not None:
        folder = _keep(case, document)
        document["out"] = folder
        lines.append(f"kept in {folder}")
    return Answer(document, parts, lines)


def look_up(name: str, options: Options) -> Case:
    """Finds the model and the device, and checks that all sizes fit."""
    model = find(name)
    sequence = options.sequence or min(
        DEFAULT_SEQUENCE, model.max_positions or DEFAULT_SEQUENCE
    )
    if model.position_rows and model.max_positions and sequence > model.max_positions:
        raise ValueError(
            f"sequence={sequence} must be at most {model.max_positions}, the positions "
            f"that {model.name} has"
        )
    layout = parallelism.parse(options.parallel, zero=options.zero)
    parallelism.check(model, layout, sequence=sequence)
    device = devices.find(options.device)
    device.rate(options.dtype)
    single = options.dtype == "float32"
    return Case(
        model=model,
        batch=options.batch,
        sequence=sequence,
        device=device,
        layout=layout,
        weight_bytes=devices.BYTES[options.dtype],
        bytes_per_param=SINGLE if single else MIXED,
        options=options,
    )


def find(name: str) -> Description:
    """Finds a model: a path first, then a published name, then a bundled one.

    Raises:
      ValueError: there is none, or its file describes no model that is counted.
    """
    if Path(name).exists():
        return huggingface.load(Path(name))
    if name in published.CONFIGS:
        return published.describe(name)
    if name in bundled.names():
        return huggingface.load(bundled.folder_of(name))
    if "/" in name or name.endswith(".json"):
        raise ValueError(f"{name}: no such file or folder")
    known = [*published.CONFIGS, *bundled.names()]
    line = config_json.unknown("model", name, known)
    raise ValueError(f"{name}: no such file or folder, and {line}")


def names() -> str:
    """Lists the models that are known by name."""
    return f"one of: {', '.join([*published.CONFIGS, *bundled.names()])}"


def describe(case: Case) -> dict[str, Any]:
    """Gives every number as a JSON document."""
    model, tokens = case.model, case.batch * case.sequence
    step, memory = case.training(), case.memory()
    params, places = parameters.parameters(model), parameters.copies(model)
    kv = serving.kv_bytes_per_token(model, kv_bytes=case.weight_bytes)
    schemes: dict[str, dict[str, float]] = {}
    for traffic in case.traffic():
        scheme = schemes.setdefault(traffic.scheme, {"forward": 0.0, "backward": 0.0})
        scheme["forward"] += traffic.forward
        scheme["backward"] += traffic.backward
    return {
        "model": model.name,
        "symbols": tables.symbols(case),
        "num_params": params._asdict(),
        "params_by_weight": {
            f"{x.part}: {x.name}": x.size * x.stored * places[x.place]
            for x in parameters.weights(model)
            if x.place != "ahead"
        },
        "flops": {
            "attention": case.options.attention,
            "forward_per_token": _divided(step.forward, tokens),
            "train_per_token": _divided(step.model, tokens),
            "decode_per_token": _divided(int(case.decode().flops), case.batch),
            **step._asdict(),
            "terms": {
                "forward": _named(case.forward()),
                "prefill": _named(case.prefill_terms()),
                "decode": _named(case.decode_terms()),
            },
        },
        "memory_bytes": memory._asdict()
        | {
            "model_state": memory.model_state,
            "total": memory.total,
            "serving_weights": params.total * case.weight_bytes,
        },
        "activation_bytes_per_token": {
            f"{x.part}: {x.name}": x.bytes for x in case.stored()
        },
        "one_layer": tables.one_layer(case),
        "kv_bytes_per_token": kv,
        "comms_bytes": schemes,
        "num_devices": case.layout.num_devices,
        "per_device": device_tables.per_device(case),
        "device": case.device.name,
        "decode": _served(case, case.decode()),
        "prefill": _served(case, case.prefill()),
    }


def _named(terms: tuple[flops.Term, ...]) -> dict[str, int]:
    return {f"{x.part}: {x.name}": x.flops for x in terms}


def _divided(total: int, tokens: int) -> int | float:
    return total // tokens if total % tokens == 0 else total / tokens


def _served(case: Case, work: serving.Work) -> dict[str, Any]:
    return (
        work._asdict()
        | {"intensity": work.intensity, "ridge": case.device.ridge(case.options.dtype)}
        | case.roofline(work)._asdict()
    )


def _keep(case: Case, document: dict[str, Any]) -> Path:
    """Writes the document, and the figure if it is wanted."""
    from experiments.framework import run_folder

    contents: dict[str, str | bytes] = {"cost.json": config_json.dumps(document)}
    if case.options.plot:
        from experiments.cli.cost import drawing

        contents |= drawing.render(case)
    return run_folder.keep(case.options.out, f"cost-{case.model.name}", contents)
