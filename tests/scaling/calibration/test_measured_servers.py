"""Tables of measured servers, and the split of their rows."""

import dataclasses
import os
from collections import Counter
from pathlib import Path

import pytest

from scaling.calibration import (
    PUBLIC_SPLIT,
    MeasuredServer,
    digest_split,
    find_implausible_servers,
    find_peak_share,
    find_server_form,
    read_measured_servers,
    split_servers,
)
from tests.support.refusals import refused

AIC_ROW = {
    "id": "row",
    "backend": "vllm",
    "model_path": "Qwen/Qwen3-32B",
    "system": "h100_sxm",
    "precision": "",
    "mode": "agg",
    "isl": "1024",
    "osl": "128",
    "batch_size": "16",
    "tp_size": "2",
    "pp_size": "1",
    "attention_dp_size": "",
    "moe_tp_size": "1",
    "moe_ep_size": "1",
    "silicon_ttft_ms": "188",
    "silicon_tpot_ms": "22.2",
}
ENERGY_ROW = {
    "task": "lm-arena-chat",
    "model_id": "openai/gpt-oss-20b",
    "gpu_model": "B200",
    "num_gpus": "2",
    "max_num_seqs": "16",
    "avg_batch_size": "15.5",
    "avg_output_len": "600",
    "expert_parallel": "2",
    "data_parallel": "1",
    "weight_precision": "mxfp4",
    "median_itl_ms": "7.5",
    "p90_itl_ms": "8",
    "p95_itl_ms": "9",
    "p99_itl_ms": "20",
    "avg_power_watts": "900",
}


def write_rows(folder: Path, *changes: dict[str, str], plain=AIC_ROW) -> Path:
    path = folder / "servers.csv"
    lines = [",".join(plain)]
    lines += [",".join((plain | change).values()) for change in changes]
    path.write_text("\n".join(lines) + "\n")
    return path


def read_one(folder: Path, **change: str) -> MeasuredServer:
    (server,) = read_measured_servers(write_rows(folder, change)).servers
    return server


def test_a_row_of_aiconfigurator(tmp_path: Path) -> None:
    server = read_one(tmp_path)
    assert server.group == ("qwen3-32b", "h100", "vllm")
    assert (server.num_devices, server.tensor_parallel) == (2, 2)
    assert (server.concurrency, server.weight_format) == (16, "bf16")
    assert (server.token_s, server.first_token_s) == (0.0222, 0.188)


@pytest.mark.parametrize(
    ("engine", "devices", "ranks_tensor"),
    [("vllm", 4, 4), ("sglang", 4, 1), ("trtllm", 16, 4)],
)
def test_devices_and_requests_by_engine(
    tmp_path: Path, engine: str, devices: int, ranks_tensor: int
) -> None:
    """Ranks divide SGLang's devices, multiply TensorRT-LLM's, are experts' on vLLM."""
    server = read_one(tmp_path, backend=engine, tp_size="4", attention_dp_size="4")
    assert server.concurrency == 16 * 4
    assert server.num_devices == devices
    assert server.tensor_parallel == ranks_tensor


def test_a_product_of_degrees_is_one_node(tmp_path: Path) -> None:
    degrees = {"tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}
    server = read_one(tmp_path, model_path="deepseek-ai/DeepSeek-R1", **degrees)
    assert (server.num_devices, server.expert_parallel) == (8, 8)


def test_formats_of_weights(tmp_path: Path) -> None:
    name = "nvidia/Qwen3-32B-NVFP4"
    assert read_one(tmp_path, model_path=name, precision="fp4").weight_format == "fp4"
    named = read_one(tmp_path, model_path="Qwen/Qwen3-32B-FP8")
    assert named.weight_format == "fp8"
    version = "nvidia/DeepSeek-R1-0528-FP4-v2"
    model = read_one(tmp_path, model_path=version, precision="fp4").model
    assert model.name == "deepseek-r1"
    oss = read_one(tmp_path, model_path="openai/gpt-oss-120b", precision="fp4")
    assert oss.weight_format == "mxfp4"


@pytest.mark.parametrize(
    ("changes", "poll_steps", "cache_bytes"),
    [
        ({"backend": "sglang", "batch_size": "8"}, 10, None),
        ({"backend": "sglang"}, 30, None),
        ({"backend": "sglang", "system": "h200_sxm"}, 1, None),
        ({"backend": "trtllm", "attention_dp_size": "2"}, 50, None),
        ({"backend": "trtllm"}, 1, None),
        ({"backend": "vllm"}, 1, 1),
        ({"backend": "vllm", "precision": "int4"}, 1, None),
        ({"backend": "vllm", "system": "h200_sxm"}, 1, None),
    ],
)
def test_mixtures_have_the_settings_of_their_launch_scripts(
    tmp_path: Path,
    changes: dict[str, str],
    poll_steps: float,
    cache_bytes: int | None,
) -> None:
    mixture = {"model_path": "deepseek-ai/DeepSeek-R1", "precision": "fp8"}
    row = {"system": "b200_sxm"} | changes
    server = read_one(tmp_path, **(mixture | row))
    assert (server.poll_steps, server.streamed_tokens) == (poll_steps, 20)
    assert server.cache_bytes == cache_bytes
    dense = read_one(tmp_path, **({"precision": "fp8"} | changes))
    assert (dense.poll_steps, dense.streamed_tokens) == (1, 1)


def test_a_row_of_ml_energy(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {}, plain=ENERGY_ROW)
    (server,) = read_measured_servers(path).servers
    assert server.name == "lm-arena-chat/openai/gpt-oss-20b/B200x2/16"
    assert server.is_median_step
    assert server.first_token_s is None
    assert (server.token_s, server.watts, server.concurrency) == (0.0075, 900, 15.5)
    assert server.token_tail_s == (0.008, 0.009, 0.02)
    assert (server.num_devices, server.expert_parallel) == (2, 2)


REFUSED = {
    "disaggregated": {"mode": "disagg", "batch_size": ""},
    "attention_dp_size is above 8": {"attention_dp_size": "64", "tp_size": "1"},
    "tp_size is above 8": {"tp_size": "16"},
    "a parallel degree is 0": {"moe_ep_size": "0"},
    "unknown device 'tpu9'": {"system": "tpu9"},
    "unknown model 'Qwen/Qwen9-1B'": {"model_path": "Qwen/Qwen9-1B"},
    "has no osl: lengths are needed": {"osl": ""},
    "silicon_tpot_ms=0.0222 is not in ms; is its unit s?": {
        "silicon_tpot_ms": "0.0222"
    },
    "silicon_ttft_ms=0.188 is not in ms; is its unit s?": {"silicon_ttft_ms": "0.188"},
    "batch_size='' must be a number of at least 1": {"batch_size": ""},
    "precision='int2' must be one of": {"precision": "int2"},
    "backend='tgi' must be one of vllm": {"backend": "tgi"},
    "tp_size='1.5' must be a whole number": {"tp_size": "1.5"},
    "attention_dp_size does not divide": {"attention_dp_size": "3"},
    "pipeline parallelism": {"pp_size": "2"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_rows_are_refused_with_a_reason(tmp_path: Path, reason: str) -> None:
    table = read_measured_servers(write_rows(tmp_path, {}, REFUSED[reason]))
    assert len(table.servers) == 1
    ((name, line),) = table.refusals
    assert line.startswith(reason)
    assert name == "row"
    assert "\n" not in line


def test_a_table_without_rows_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"system": "tpu9"})
    with refused("no row can be read: row: unknown device 'tpu9'"):
        read_measured_servers(path)
    path.write_text("a,b\n1,2\n")
    with refused("needs the columns of AIConfigurator (backend, model_path"):
        read_measured_servers(path)
    assert find_server_form(["run", "stage"]) is None


def test_a_group_above_the_peak_is_implausible(tmp_path: Path) -> None:
    """1,024 + 128 tokens of 64 GFLOP, 16 at once, in 3.0 s on two H100s: 0.20."""
    times = {"silicon_tpot_ms": "0.5", "silicon_ttft_ms": "80"}
    table = read_measured_servers(
        write_rows(
            tmp_path,
            {},
            {"id": "fast", "model_path": "Qwen/Qwen3-14B", **times},
            {"id": "slow", "model_path": "Qwen/Qwen3-14B"},
        )
    )
    share = find_peak_share(table.servers[0])
    tokens_flops = 1152 * 2 * 31_206_277_120 + 128 * 2 * 777_912_320
    seconds = 0.188 + 128 * 0.0222
    assert share == pytest.approx(16 * tokens_flops / seconds / 2 / 989.4e12, rel=0.01)
    names = [x.name for x in find_implausible_servers(table.servers)]
    assert names == ["fast", "slow"]


def test_checkpoints_of_one_shape_are_left_out_together(tmp_path: Path) -> None:
    names = ("deepseek-ai/DeepSeek-V3", "nvidia/DeepSeek-R1-NVFP4", "Qwen/Qwen3-8B")
    changes = [{"id": f"row-{i}", "model_path": x} for i, x in enumerate(names)]
    servers = read_measured_servers(write_rows(tmp_path, *changes)).servers
    models = split_servers(servers, "model")
    assert [x.name for x in models] == ["deepseek-r1", "qwen3-8b"]
    assert [len(x.held_out) for x in models] == [2, 1]
    developers = [x.name for x in split_servers(servers, "developer")]
    assert developers == ["deepseek-ai", "qwen"]
    for fold in models:
        assert not {*fold.fitted} & {*fold.held_out}
    assert digest_split(servers) == digest_split(servers[::-1])
    renamed = (dataclasses.replace(servers[0], name="other"), *servers[1:])
    assert digest_split(servers) != digest_split(renamed)


def test_the_split_of_public_rows_is_the_committed_one() -> None:
    folder = Path(os.environ.get("JAXKV_DATA", ""), "servers2026")
    if not (folder / "aic_servers.csv").is_file():
        pytest.skip("JAXKV_DATA has no servers2026")
    tables = [
        read_measured_servers(folder / name)
        for name in ("aic_servers.csv", "mlenergy_servers.csv")
    ]
    servers = [x for table in tables for x in table.servers]
    implausible = find_implausible_servers(servers)
    assert len(implausible) == 17
    assert {x.checkpoint for x in implausible} == {"nvidia/Llama-3.1-8B-Instruct-FP8"}
    dropped = {*map(id, implausible)}
    assert digest_split([x for x in servers if id(x) not in dropped]) == PUBLIC_SPLIT
    reasons = Counter(reason[:8] for _, reason in tables[0].refusals)
    assert reasons == {"disaggre": 554, "attentio": 32, "a parall": 6}
