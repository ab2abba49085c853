"""Measured servers under a constant number of requests, one row each.

Two forms of CSV are read. That of AIConfigurator has `backend`, `model_path`, `system`,
`precision`, `mode`, `isl`, `osl`, `batch_size`, `tp_size`, `attention_dp_size`,
`moe_tp_size` and `moe_ep_size`, with `silicon_ttft_ms` and `silicon_tpot_ms` where they
were measured. That of ML.ENERGY has `model_id`, `gpu_model`, `num_gpus`,
`avg_batch_size` and `avg_output_len`, with `median_itl_ms`, `p90_itl_ms`, `p95_itl_ms`,
`p99_itl_ms` and `avg_power_watts`.

`batch_size` is of an attention rank: the concurrency is `batch_size *
attention_dp_size`. A server has `tp_size` devices on vLLM and SGLang, whose attention
ranks divide them, and `tp_size * attention_dp_size` on TensorRT-LLM. Some rows have
the product of tensor and expert parallelism as `tp_size`, 64 with `moe_tp_size` 8 and
`moe_ep_size` 8: such a server has `moe_ep_size` devices.

Without `precision` the format of the weights is that of `gemm_quant_mode` or of the
checkpoint's name, else 16 bits.

Tables lack the settings of engines. Those of mixtures in the first form follow the
launch scripts of the benchmark that measured most of them.

A row that cannot be read rightly is refused with its reason and stays in the table.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from jaxkv.files import RawRow, read_table
from scaling import shapes
from scaling.costs import Device, find_device
from scaling.shapes import ModelShape

type WeightFormat = Literal["bf16", "fp8", "fp4", "mxfp4", "int4"]
"""Format of the weights of a server: 16 bits, 8 bits, NVFP4, MXFP4, or groups of 4-bit
integers."""

ENGINES = ("vllm", "sglang", "trtllm")
"""Names of the engines in `backend`."""
NODE_DEVICES = 8
"""Devices of one node; larger degrees of a row are doubtful."""
CHAT_PROMPT_TOKENS = 200.0
"""Mean prompt of ML.ENERGY's tasks, which its rows lack: chats of LM Arena."""

_FORMAT_SUFFIX = re.compile(
    r"-(fp8|nvfp4|fp4|mxfp4|int4|awq)(-dynamic|-block|-v\d+)?$", re.IGNORECASE
)
_WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "": "bf16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "mxfp4",
    "int4": "int4",
    "fp8_block": "fp8",
    "int4_wo": "int4",
    "awq": "int4",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredServer:
    """A server under a constant number of requests, with fixed lengths."""

    name: str
    """Name of the row."""
    engine: str
    """One of `ENGINES`."""
    checkpoint: str
    """Name of the checkpoint in the table."""
    model: ModelShape
    """Shape of the model."""
    device: Device
    """Accelerator."""
    weight_format: WeightFormat
    """Format of the weights."""
    num_devices: int
    """Devices of the server."""
    data_parallel: int
    """Attention ranks, each with a part of the requests and all attention weights."""
    expert_parallel: int
    """Devices that divide whole experts; 1 if all divide each expert."""
    concurrency: float
    """Requests in the system, in tokens per step while all decode."""
    prompt_tokens: float
    """Length of the prompts in tokens."""
    answer_tokens: float
    """Length of the answers in tokens."""
    token_s: float | None = None
    """Measured time per token after the first in s."""
    first_token_s: float | None = None
    """Measured time from a request to its first token in s."""
    token_tail_s: tuple[float, ...] | None = None
    """Measured percentiles 90, 95 and 99 of the time between tokens in s."""
    watts: float | None = None
    """Measured power of all devices in W."""
    token_joules: float | None = None
    """Measured energy of an answer's token in J, prompts included."""
    poll_steps: float = 1.0
    """Decode steps between two looks of the engine at new requests."""
    streamed_tokens: float = 1.0
    """Tokens of a message to a client."""
    cache_bytes: int | None = None
    """Bytes of a number of K and V; None for the default of engine and format."""
    is_median_step: bool = False
    """True if `token_s` is the median time between tokens, which hides the steps with
    prompts, and `concurrency` the mean number of running requests."""

    @property
    def tensor_parallel(self) -> int:
        """Devices that divide the attention of a rank."""
        return self.num_devices // self.data_parallel

    @property
    def group(self) -> tuple[str, str, str]:
        """Model, device and engine."""
        return self.model.name, self.device.name, self.engine


class ServerTable(NamedTuple):
    """Rows of a table of measured servers."""

    servers: tuple[MeasuredServer, ...]
    refusals: tuple[tuple[str, str], ...]
    """Name and reason of each row that is not read."""


def read_measured_servers(path: str | os.PathLike[str]) -> ServerTable:
    """Reads a table of measured servers in one of the forms of the module docstring.

    Raises:
      ValueError: the file cannot be read, has neither form, or no row can be read; one
        line with the file and the first reason.
    """
    table = read_table(path, allow_partial=False)
    form = find_server_form(table.names)
    if form is None:
        raise ValueError(
            f"{path}: needs the columns of AIConfigurator ({', '.join(_AIC_COLUMNS)}) "
            f"or of ML.ENERGY ({', '.join(_ENERGY_COLUMNS)})"
        )
    read = _read_aiconfigurator if form == "aiconfigurator" else _read_energy
    servers = []
    refusals = []
    for row in table.rows:
        cells = {name: str(cell or "").strip() for name, cell in row.cells.items()}
        name = cells.get("id") or row.place
        try:
            servers.append(read(name, cells, row))
        except ValueError as error:
            refusals.append((name, str(error)))
    if not servers:
        reason = f"{refusals[0][0]}: {refusals[0][1]}" if refusals else "no rows"
        raise ValueError(f"{path}: no row can be read: {reason}")
    return ServerTable(tuple(servers), tuple(refusals))


_AIC_COLUMNS = ("backend", "model_path", "system", "isl", "osl", "batch_size")
_ENERGY_COLUMNS = ("model_id", "gpu_model", "num_gpus", "avg_batch_size")


def find_server_form(
    names: Iterable[str],
) -> Literal["aiconfigurator", "ml.energy"] | None:
    """Returns the form of a table of servers with these columns, None for others."""
    columns = {*names}
    if columns.issuperset(_AIC_COLUMNS):
        return "aiconfigurator"
    return "ml.energy" if columns.issuperset(_ENERGY_COLUMNS) else None


def _read_aiconfigurator(
    name: str, cells: Mapping[str, str], row: RawRow
) -> MeasuredServer:
    if cells.get("mode", "agg") != "agg":
        raise ValueError("disaggregated: prefill and decode have separate workers")
    engine = cells["backend"].lower()
    tensor, ranks, divided, experts = (
        _count(cells, key, default=1)
        for key in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    )
    if _count(cells, "pp_size", default=1) > 1:
        raise ValueError("pipeline parallelism is not modelled")
    if not all((tensor, ranks, divided, experts)):
        raise ValueError("a parallel degree is 0")
    if ranks > NODE_DEVICES:
        raise ValueError(f"attention_dp_size is above {NODE_DEVICES}, those of a node")
    if tensor > NODE_DEVICES:
        if divided != experts or divided * experts != tensor * ranks:
            raise ValueError(f"tp_size is above {NODE_DEVICES}, those of a node")
        tensor = experts
    num_devices = tensor * ranks if engine == "trtllm" else tensor
    concurrency = _number(cells, "batch_size", low=1.0) * ranks
    if num_devices % ranks:
        raise ValueError("attention_dp_size does not divide the devices")
    if engine not in ENGINES:
        raise ValueError(f"backend={engine!r} must be one of {', '.join(ENGINES)}")
    checkpoint = cells["model_path"]
    server = MeasuredServer(
        name=name,
        engine=engine,
        checkpoint=checkpoint,
        model=_find_model(checkpoint),
        device=find_device(cells["system"]),
        weight_format=_find_format(
            checkpoint, cells.get("precision") or cells.get("gemm_quant_mode", "")
        ),
        num_devices=num_devices,
        # vLLM's servers divide attention over all devices, and experts by ranks.
        data_parallel=1 if engine == "vllm" else ranks,
        expert_parallel=min(experts, num_devices),
        concurrency=concurrency,
        prompt_tokens=_length(cells, "isl"),
        answer_tokens=_length(cells, "osl"),
        token_s=_milliseconds(cells, "silicon_tpot_ms", low=0.3, high=2e4),
        first_token_s=_milliseconds(cells, "silicon_ttft_ms", low=3.0, high=6e6),
    )
    return server if server.model.experts is None else _use_launch_settings(server)


def _use_launch_settings(server: MeasuredServer) -> MeasuredServer:
    """Returns a row with the settings of the scripts that launched such servers.

    SGLang on B200 and B300 looks for requests every 10 steps, or 30 from 16 requests.
    TensorRT-LLM's attention ranks wait up to 50 steps until each has a prompt. Messages
    have 10 to 50 tokens. vLLM has a cache of 8 bits on devices with 4-bit products.

    Source: github.com/SemiAnalysisAI/InferenceX, benchmarks/single_node, at 0ee5ff3
    (B300: at 843c625).
    """
    poll_steps = 1.0
    if server.engine == "sglang" and server.device.name in ("b200", "b300"):
        poll_steps = 30.0 if server.concurrency >= 16 else 10.0
    if server.engine == "trtllm" and server.data_parallel > 1:
        poll_steps = 50.0
    has_low_cache = server.engine == "vllm" and bool(server.device.float4)
    has_low_cache &= server.weight_format in ("fp8", "fp4", "mxfp4")
    return dataclasses.replace(
        server,
        poll_steps=poll_steps,
        streamed_tokens=20.0,
        cache_bytes=1 if has_low_cache else None,
    )


def _read_energy(name: str, cells: Mapping[str, str], row: RawRow) -> MeasuredServer:
    watts, token_joules = (
        _number(cells, key, low=0.0) if cells.get(key) else None
        for key in ("avg_power_watts", "energy_per_token_joules")
    )
    names = ("p90_itl_ms", "p95_itl_ms", "p99_itl_ms")
    tail_s = [_milliseconds(cells, key, low=0.3, high=2e4) for key in names]
    size = cells.get("max_num_seqs", "")
    parts = (cells.get("task", ""), cells["model_id"], cells["gpu_model"])
    checkpoint = cells["model_id"]
    num_devices = _count(cells, "num_gpus")
    ranks = _count(cells, "data_parallel", default=1)
    if not num_devices or not ranks or num_devices % ranks:
        raise ValueError("data_parallel does not divide num_gpus")
    return MeasuredServer(
        name=f"{'/'.join(parts)}x{cells['num_gpus']}/{size}",
        engine="vllm",
        checkpoint=checkpoint,
        model=_find_model(checkpoint),
        device=find_device(cells["gpu_model"]),
        weight_format=_find_format(checkpoint, cells.get("weight_precision", "")),
        num_devices=num_devices,
        data_parallel=ranks,
        expert_parallel=_count(cells, "expert_parallel", default=1),
        concurrency=_number(cells, "avg_batch_size", low=0.5),
        prompt_tokens=CHAT_PROMPT_TOKENS,
        answer_tokens=_length(cells, "avg_output_len"),
        token_s=_milliseconds(cells, "median_itl_ms", low=0.3, high=2e4),
        token_tail_s=tuple(x for x in tail_s if x is not None) or None,
        watts=watts,
        token_joules=token_joules,
        is_median_step=True,
    )


def _find_format(checkpoint: str, name: str) -> WeightFormat:
    if not name and (suffix := _FORMAT_SUFFIX.search(checkpoint)):
        name = suffix[1]
    if name.lower() not in _WEIGHT_FORMATS:
        formats = ", ".join(filter(None, _WEIGHT_FORMATS))
        raise ValueError(f"precision={name!r} must be one of {formats}")
    weight_format = _WEIGHT_FORMATS[name.lower()]
    if "gpt-oss" in checkpoint and weight_format != "bf16":
        return "mxfp4"  # the only format of the checkpoints
    return weight_format


def _find_model(checkpoint: str) -> ModelShape:
    try:
        return shapes.describe_checkpoint(_FORMAT_SUFFIX.sub("", checkpoint))
    except ValueError:
        # The list of all models would hide the name.
        raise ValueError(f"unknown model {checkpoint!r}") from None


def _number(cells: Mapping[str, str], key: str, *, low: float) -> float:
    text = cells.get(key, "")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value < math.inf:
        raise ValueError(f"{key}={text!r} must be a number of at least {low:g}")
    return value


def _count(cells: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = cells.get(key, "")
    if not text and default is not None:
        return default
    value = _number(cells, key, low=0.0)
    if value != int(value):
        raise ValueError(f"{key}={text!r} must be a whole number")
    return int(value)


def _length(cells: Mapping[str, str], key: str) -> float:
    if not cells.get(key):
        raise ValueError(f"has no {key}: lengths are needed for a prediction")
    return _number(cells, key, low=1.0)


def _milliseconds(
    cells: Mapping[str, str], key: str, *, low: float, high: float
) -> float | None:
    if not cells.get(key):
        return None
    value = _number(cells, key, low=0.0)
    if not low <= value <= high:
        unit = "s" if value < low else "us"
        raise ValueError(f"{key}={value:g} is not in ms; is its unit {unit}?")
    return value / 1e3
