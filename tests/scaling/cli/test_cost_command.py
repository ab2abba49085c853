"""`jaxkv cost`: document, tables, answers, figure, and errors."""

import json
import os
from pathlib import Path

import pytest

from tests.support.commands import Command, assert_refused, document, words
from tests.support.folders import GOLDEN


@pytest.fixture
def cost(jaxkv: Command) -> Command:
    return lambda *args: jaxkv("cost", *args)


def test_the_document_of_llama_2_7b(cost: Command) -> None:
    report = document(cost, "llama-2-7b", "--sequence", "2048")
    assert report["num_params"].items() >= {
        ("total", 6_738_415_616),
        ("non_embedding", 6_476_271_616),
        ("matmul", 6_607_077_376),
        ("active", 6_738_415_616),
    }
    assert report["flops"]["forward_per_token"] == 14_287_896_576
    assert report["flops"]["train_per_token"] == 42_863_689_728
    assert report["kv_bytes_per_token"] == 524_288
    assert report["memory_bytes"]["model_state"] == 16 * 6_738_415_616
    assert report["comms_bytes"] == {}
    assert sum(report["params_by_weight"].values()) == 6_738_415_616
    terms = report["flops"]["terms"]
    assert sum(terms["forward"].values()) == 2048 * 14_287_896_576
    assert terms["decode"]["attention: scores"] == 32 * 2 * 2048 * 4096
    assert terms["prefill"]["head: head"] == 2 * 32_000 * 4096
    assert report["symbols"]["i"] == 11_008
    assert (report["prefill"]["bound"], report["decode"]["bound"]) == (
        "compute",
        "memory",
    )


def test_one_layer_of_the_assignment(cost: Command) -> None:
    assert document(cost, "llama-2-7b")["one_layer"].items() >= {
        ("num_params", 202_383_360),
        ("forward_flops", 1_932_735_283_200),
        ("boundary_bytes", 33_554_432),
        ("activation_bytes", 4096 * (131_584 + 128)),
    }
    mixed = document(cost, "deepseek-v3")["one_layer"]
    assert mixed["num_params"] == 11_507_286_272


def test_layers_of_different_sizes_have_no_training_memory(cost: Command) -> None:
    folder = str(GOLDEN / "gemma4")
    report = document(cost, folder)
    assert sum(report["params_by_weight"].values()) == report["num_params"]["total"]
    assert report["num_params"]["total"] == 89_546
    assert report["kv_bytes_per_token"] == 2 * (2 * 2 * 10 + 2 * 14)
    assert {"one_layer", "activation_bytes_per_token"}.isdisjoint(report)
    assert report["memory_bytes"] == {"serving_weights": 2 * 89_546}
    text = words(cost, folder)
    assert "2 of 4 layers read K and V of earlier ones" in text
    assert "training memory, are not counted" in text
    line = "tensor=2 must be 1: the layers with sizes of their own of gemma4"
    assert_refused(cost, f"{folder} --parallel tp=2", line)


def test_per_device_costs_and_traffic_of_a_layout(cost: Command) -> None:
    args = ("--parallel", "tp=8,sp,pp=2", "--device", "h100", "--zero", "1")
    report = document(cost, "llama-2-7b", *args, "--attention", "causal")
    assert report["num_devices"] == 16
    # Half of the layers, four all-reduces each.
    assert report["comms_bytes"]["tensor"]["forward"] == 3_758_096_384 / 2
    assert report["comms_bytes"]["pipeline"]["forward"] == 33_554_432 / 8
    # One micro-batch in three ticks; both tables and the last norm on each stage.
    assert report["comms_bytes"]["idle"]["backward"] == 2 * 33_554_432 / 8
    tables = (2 * 32_000 // 8 + 1) * 4096
    assert report["comms_bytes"]["tables"] == {"forward": 0, "backward": tables * 2}
    assert report["flops"]["attention"] == "causal"
    assert report["memory_bytes"]["weights"] < 2 * 6_738_415_616 / 15


def test_context_parallel_pages_send_per_row(cost: Command) -> None:
    output = words(cost, "llama-3.1-8b", "--sequence", "4096", "--parallel", "cp=4")
    for part in (
        "one step of b rows, s = 1",
        "one pass over b s rows, divided by cp=4",
        "1.21 GB",  # queries, keys and values
    ):
        assert part in output
    odd = words(cost, "llama-3.1-8b", "--sequence", "4095", "--parallel", "cp=4")
    assert "one pass over b s rows, not divided by cp=4" in odd


def test_tables_and_answers_agree_with_the_document(cost: Command) -> None:
    output = words(cost, "llama-2-7b", "--checkpoint", "boundary")
    for part in (
        "gate and up 2 h i 90,177,536 32 2,885,681,152",
        "total 6,738,415,616",
        "training 3 X 46.1 GFLOP 189 TFLOP",
        "1,073,741,824 bytes (1 GiB) over 32 layers",
        "33,554,432 bytes per direction",
        "half of it at s = 25,204",
        "llama-2-7b has no experts. With 8 experts",
        "memory-bound at every batch size, because K and V limit it to 7.15",
    ):
        assert part in output


def test_a_mixture_is_explained_by_its_own_numbers(cost: Command) -> None:
    output = words(cost, "mixtral-8x7b")
    assert "Of 46.7 G parameters a token uses 12.88 G" in output
    assert "3.63 times the parameters" in output
    assert cost("mixtral-8x7b", "--sequence", "1")[0] == 0
    # To the experts and back, k h of two bytes per direction; one in eight is local.
    report = document(cost, "mixtral-8x7b", "--parallel", "ep=8")
    assert (
        report["comms_bytes"]["expert"]["forward"]
        == 32 * 4096 * 2 * 2 * 4096 * 2 * 7 / 8
    )


def test_every_known_model_has_costs(cost: Command) -> None:
    for name in ("deepseek-v3", "gemma-2-9b", "stdlib-bytes"):
        assert name in words(cost, name)


def test_a_file_and_a_folder_are_read(cost: Command) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    }
    for name in ("config.json", "llama_7b_config.json"):
        Path(name).write_text(json.dumps(config))
    for path in (".", "config.json", "llama_7b_config.json"):
        report = document(cost, path)
        assert report["num_params"]["total"] == 6_738_415_616
    assert report["model"] == "llama_7b_config"


@pytest.mark.slow
def test_figure_and_document_are_written(cost: Command) -> None:
    report = document(cost, "smollm2-135m", "--plot", "--out", "here")
    stored_report = json.loads(Path("here/cost.json").read_text())
    assert stored_report["num_params"] == report["num_params"]
    assert Path("here/figure.png").read_bytes()[:4] == b"\x89PNG"
    first = Path("here/figure.svg").read_bytes()
    assert b"memory-bound below" in first
    document(cost, "smollm2-135m", "--plot")  # a new folder, the same bytes
    (again,) = Path("runs").iterdir()
    assert again.name.startswith("cost-smollm2-135m-")
    assert (again / "figure.svg").read_bytes() == first


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("", "MODEL is missing: a config.json, a folder, or one of: llama-7b"),
        ("llama-2-8b", "did you mean llama-3-8b or llama-2-7b or"),
        ("here/there.json", "here/there.json: no such file or folder"),
        ("bad.json", "bad.json: not JSON"),
        ("two.json", "model_type='llama' contradicts architecture 'MistralForC"),
        ("layers.json", "layers.json: num_hidden_layers=3 contradicts n_layer=2"),
        ("llama-2-7b --batch 0", "batch=0 must be in [1, 1099511627776]"),
        ("llama-2-7b --sequence -5", "sequence=-5 must be in"),
        ("gpt2 --sequence 2048", "sequence=2048 must be at most 1024"),
        ("llama-2-7b --zero 4", "jaxkv: zero=4 must be 0, 1, 2 or 3"),
        ("llama-2-7b --parallel sp", "over the devices of tensor (tp), and tensor=1"),
        ("llama-2-7b --parallel tp=1,sp", "and tensor=1: ulysses or ring divide it"),
        ("llama-2-7b --parallel tp=4,sp=4", "'sp=4' in 'tp=4,sp=4': sp has no degree"),
        ("llama-2-7b --device a200", "unknown device 'a200'"),
        ("llama-2-7b --device a100 --dtype float8", "no units for float8"),
        ("llama-2-7b --out bad.json", "bad.json: cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    cost: Command, args: str, line: str
) -> None:
    for name, text in WRONG.items():
        Path(f"{name}.json").write_text(text)
    assert_refused(cost, args, line)


WRONG = {
    "bad": "{",
    "two": '{"model_type": "llama", "architectures": ["MistralForCausalLM"]}',
    "layers": '{"model_type": "gpt2", "n_layer": 2, "num_hidden_layers": 3}',
}


def test_piped_tables_fit_80_columns(
    cost: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    wide = os.terminal_size((160, 50))
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: wide)
    layout = ("--parallel", "tp=8,sp,pp=2", "--device", "h100")
    for args in (("mixtral-8x7b", "--parallel", "ep=4"), ("llama-2-7b", *layout)):
        status, out, _ = cost(*args)
        assert status == 0
        assert max(map(len, out.splitlines())) <= 80
