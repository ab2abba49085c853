"""Parameters and bytes of keys and values: published integers, and bundled models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxkv import models
from jaxkv.models import init_params, param_shapes, read_config
from scaling.costs import (
    count_parameters,
    kv_bytes_per_token,
    list_weights,
    pool_kv_bytes,
    sequence_kv_bytes,
)
from scaling.shapes import (
    CONFIGS,
    HeadAttention,
    MixtureShape,
    ModelShape,
    describe,
    describe_checkpoint,
    describe_config,
    describe_huggingface,
    load_shape,
)
from tests.support.folders import GOLDEN
from tests.support.refusals import refused
from tests.support.shapes import BIASED, GROUPED

# Total parameters, and bytes of K and V of a token in 16 bits.
PUBLISHED = {
    "llama-7b": (6_738_415_616, 524_288),
    "llama-2-7b": (6_738_415_616, 524_288),
    "llama-2-13b": (13_015_864_320, 819_200),
    "llama-2-70b": (68_976_648_192, 327_680),
    "llama-3.1-8b": (8_030_261_248, 131_072),
    "llama-3.1-70b": (70_553_706_496, 327_680),
    "llama-3.1-405b": (405_853_388_800, 516_096),
    "mistral-7b": (7_241_732_096, 131_072),
    "mixtral-8x7b": (46_702_792_704, 131_072),
    "gpt2": (124_439_808, 36_864),
    "gpt3-175b": (174_604_259_328, 4_718_592),
    "opt-13b": (12_853_473_280, 819_200),
    "deepseek-v3": (671_026_419_200, 70_272),
    # From the published checkpoints.
    "deepseek-v2": (235_741_434_880, 69_120),
    "smollm2-135m": (134_515_008, 23_040),
    "gpt2-xl": (1_557_611_200, 307_200),
    "qwen2-0.5b": (494_032_768, 12_288),
    "qwen2-7b": (7_615_616_512, 57_344),
    "qwen3-0.6b": (596_049_920, 114_688),
    "qwen3-8b": (8_190_735_360, 147_456),
    "qwen3-30b-a3b": (30_532_122_624, 98_304),
    "gemma-2b": (2_506_172_416, 18_432),
    "gemma-7b": (8_537_680_896, 458_752),
    "gemma-2-2b": (2_614_341_888, 106_496),
    "gemma-2-9b": (9_241_705_984, 344_064),
    "llama-3-8b": (8_030_261_248, 131_072),
    "llama-3-70b": (70_553_706_496, 327_680),
    "llama-3.2-1b": (1_235_814_400, 32_768),
    "llama-3.2-3b": (3_212_749_824, 114_688),
    "codellama-7b": (6_738_546_688, 524_288),
    "codellama-13b": (13_016_028_160, 819_200),
    "codellama-34b": (33_743_970_304, 196_608),
    "codellama-70b": (68_976_910_336, 327_680),
    "yi-34b": (34_388_917_248, 245_760),
    "phi-4": (14_659_507_200, 204_800),
    "mistral-7b-v0.2": (7_241_732_096, 131_072),
    "mistral-7b-v0.3": (7_248_023_552, 131_072),
    "mistral-nemo": (12_247_782_400, 163_840),
    "mistral-small-24b": (23_572_403_200, 163_840),
    "mixtral-8x22b": (140_620_634_112, 229_376),
    "qwen2-72b": (72_706_203_648, 327_680),
    "qwen2.5-0.5b": (494_032_768, 12_288),
    "qwen2.5-1.5b": (1_543_714_304, 28_672),
    "qwen2.5-3b": (3_085_938_688, 36_864),
    "qwen2.5-7b": (7_615_616_512, 57_344),
    "qwen2.5-14b": (14_770_033_664, 196_608),
    "qwen2.5-32b": (32_763_876_352, 262_144),
    "qwen2.5-72b": (72_706_203_648, 327_680),
    "qwen3-1.7b": (1_720_574_976, 114_688),
    "qwen3-4b": (4_022_468_096, 147_456),
    "qwen3-14b": (14_768_307_200, 163_840),
    "qwen3-32b": (32_762_123_264, 262_144),
    "qwen3-235b-a22b": (235_093_634_560, 192_512),
    "gemma-2-27b": (27_227_128_320, 376_832),
    "gpt-oss-20b": (20_908_119_360, 49_152),
    "gpt-oss-120b": (116_789_336_640, 73_728),
    "glm-5": (743_180_209_920, 89_856),
    "kimi-k2.5": (1_026_408_232_448, 70_272),
    "minimax-m2.5": (228_689_320_448, 253_952),
    "llama-4-scout-17b-16e": (107_769_861_120, 196_608),
    "llama-4-maverick-17b-128e": (400_711_848_960, 196_608),
    # 15 of 60 layers have K and V.
    "qwen3.5-397b-a17b": (396_346_350_336, 30_720),
    "qwen3.5-122b-a10b": (122_111_526_912, 24_576),
    "qwen3-next-80b-a3b": (79_674_391_296, 24_576),
    # 7 of 27 and 8 of 32 layers have attention.
    "kimi-linear-48b-a3b": (49_122_681_728, 8_064),
    "olmo-hybrid-7b": (7_430_870_688, 122_880),
    "qwen3-coder-480b-a35b": (480_154_875_392, 253_952),
    "glm-4.5-air": (106_852_251_264, 188_416),
    "gemma-3-12b": (11_766_034_176, 393_216),
}

OURS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "mistral": {"family": "mistral", "window": 7},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "num_layers": 1},
    "qwen3": {"family": "qwen3", "qk_norm": True, "out_bias": True},
    "mixtral": {"experts": models.Experts(num_experts=5, top_k=2, size=40)},
    "shared": {
        "experts": models.Experts(
            num_experts=5,
            top_k=2,
            size=12,
            shared_size=20,
            shared_gate=True,
            num_dense_layers=1,
        ),
    },
    "gpt2": {"family": "gpt2", "num_kv_heads": 6, **BIASED},
    "opt": {
        "family": "opt",
        "position_offset": 2,
        "activation": "relu",
        "num_kv_heads": 6,
        **BIASED,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    model = describe(name)
    counts = count_parameters(model).total, kv_bytes_per_token(model)
    assert counts == PUBLISHED[name]


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("google/gemma-2-27b-it", "gemma-2-27b"),
        ("microsoft/phi-4", "phi-4"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout-17b-16e"),
    ],
)
def test_checkpoints_have_the_shape_of_their_model(checkpoint: str, name: str) -> None:
    assert describe_checkpoint(checkpoint) == describe(name)


def test_a_checkpoint_may_be_a_path_and_is_otherwise_refused() -> None:
    folder = GOLDEN / "qwen3"
    assert describe_checkpoint(str(folder)).name == "qwen3"
    assert describe_checkpoint(str(folder / "config.json")) == load_shape(folder)
    with refused("unknown model 'llama-3.1-8b-fp8'; did you mean llama-3.1-8b"):
        describe_checkpoint("meta-llama/Llama-3.1-8B-FP8")
    with refused("no such file"):
        describe_checkpoint("missing/config.json")


def test_a_tied_table_is_no_active_non_embedding_parameter() -> None:
    tied = [model for name in CONFIGS if (model := describe(name)).tie_embeddings]
    assert len(tied) > 5
    for model in tied:
        counts = count_parameters(model)
        if model.num_mixture_layers:
            assert counts.active_non_embedding < counts.non_embedding
        else:
            assert counts.active_non_embedding == counts.non_embedding
    gpt2 = count_parameters(describe("gpt2"))
    assert gpt2.active_non_embedding == 85_056_000


def test_a_mixture_counts_the_experts_a_token_uses() -> None:
    counts = count_parameters(describe("mixtral-8x7b"))
    assert counts.active == 12_879_925_248
    assert counts.active_non_embedding == 12_748_853_248
    # Llama-2-7B's head: 32,000 x 4,096; the router is a matrix product, too.
    attention = 41_943_040
    expert = 3 * 4096 * 14336
    head = 131_072_000
    layer = attention + 2 * expert + 8 * 4096
    assert counts.matmul == 32 * layer + head
    assert counts.matmul_total == 32 * (layer + 6 * expert) + head


def test_latent_attention_and_layers_that_look_ahead() -> None:
    model = describe("deepseek-v3")
    counts = count_parameters(model)
    assert counts.active == 37_552_297_472
    assert counts.active_non_embedding == 36_625_618_432
    assert counts.ahead == 11_610_068_224
    tables = 2 * model.vocab_size * model.hidden_size
    assert counts.total + counts.ahead + tables == 684_489_845_504  # as it is stored
    attention = [w.size for w in list_weights(model) if w.part == "attention"]
    ahead = attention[len(attention) // 2 :]
    assert sum(attention) - sum(ahead) == 187_107_328
    assert sum(ahead) == 187_107_328


@pytest.mark.parametrize("name", OURS)
def test_models_have_the_counted_parameters(name: str) -> None:
    config = dataclasses.replace(GROUPED, **OURS[name])
    shapes = jax.tree.leaves(param_shapes(config))
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    total = count_parameters(describe_config(config)).total
    assert total == sum(x.size for x in shapes)
    assert total == sum(x.size for x in jax.tree.leaves(params))


COUNTED = json.loads((GOLDEN / "hf_parameter_counts.json").read_text())
"""Models of every family, built by transformers 5.23 on its meta device: the relevant
keys of their config.json, and the sizes of all tensors. Buffers are the routing
corrections."""


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case["config"]["model_type"])
def test_counts_equal_those_of_transformers(case: dict[str, Any]) -> None:
    model = describe_huggingface(case["config"])
    assert count_parameters(model).total == case["parameters"] + case["buffers"]
    kinds = case["config"].get("layer_types") or []
    if "sliding_attention" in kinds:
        without = {k: v for k, v in case["config"].items() if k != "layer_types"}
        assert describe_huggingface(without) == model


def test_a_window_bounds_the_cache_of_a_sequence() -> None:
    model = describe("gemma-2-2b")
    per_layer = 2 * model.attention.cached_numbers
    num_bytes = sequence_kv_bytes(model, 5000)
    assert num_bytes == 13 * (4096 + 5000) * per_layer


def test_pages_of_a_pool_are_those_of_each_kind_of_layer() -> None:
    model = describe("gemma-3-12b")
    per_page = 16 * 2 * model.attention.cached_numbers
    assert pool_kv_bytes(model, num_pages=100) == 48 * 100 * per_page
    released = pool_kv_bytes(model, num_pages=100, num_window_pages=7)
    assert released == (8 * 100 + 40 * 7) * per_page


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    plain = describe_huggingface(LLAMA)
    assert plain.attention == HeadAttention(num_q_heads=4, num_kv_heads=4, head_dim=8)
    assert not plain.tie_embeddings
    old = {k: v for k, v in LLAMA.items() if k != "model_type"}
    old |= {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048}
    assert describe_huggingface(old) == plain
    qwen = describe_huggingface(LLAMA | {"model_type": "qwen3"})
    assert qwen.attention.key_dim == 128
    gemma = describe_huggingface(LLAMA | {"model_type": "gemma2", "head_dim": 16})
    assert gemma.tie_embeddings
    assert gemma.windows == (4096, None)
    mistral = LLAMA | {"model_type": "mistral", "num_attention_heads": 8}
    assert describe_huggingface(mistral).windows == (4096, 4096)
    no_window = mistral | {"sliding_window": None, "num_key_value_heads": None}
    assert describe_huggingface(no_window).windows == (None, None)
    gpt = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1}
    assert describe_huggingface(gpt | {"n_head": 2}).mlp_size == 32


OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 40,
    "max_position_embeddings": 64,
}
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "vocab_size": 90,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 48,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (OPT, 26_008),
        (OPT | {"enable_bias": False}, 25_408),
        (QWEN2_MOE | {"qkv_bias": False}, 77_504),
        (QWEN2_MOE | {"num_attention_heads": 32}, 69_568),  # for 16 KV heads
    ],
)
def test_keys_that_change_biases_and_heads(raw: dict[str, Any], count: int) -> None:
    """Counts of transformers 5.24, of models on its meta device."""
    assert count_parameters(describe_huggingface(raw)).total == count


def test_another_name_of_a_key_is_read() -> None:
    raw = dict(CONFIGS["deepseek-v3"])
    del raw["num_nextn_predict_layers"], raw["n_routed_experts"]
    names = {"num_mtp_layers": 3, "num_local_experts": 12}  # names of transformers 5.24
    shape = describe_huggingface(raw | names)
    assert shape.num_ahead_layers == 3
    assert shape.experts is not None
    assert shape.experts.num_experts == 12


def test_the_bundled_model_reads_as_both() -> None:
    from jaxkv.files import model_folder
    from jaxkv.models.huggingface import configs

    path = model_folder("stdlib-bytes")
    raw = json.loads((path / "config.json").read_text())
    actual = describe_config(configs.from_hf(raw), name="stdlib-bytes")
    assert load_shape(path) == actual


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not counted, only llama"),
        ({"model_type": None}, "model_type=None is not counted"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -4}, "hidden_size=-4 must be a whole number, at least 1"),
        ({"hidden_size": 33}, "hidden_size=33 must be a multiple"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 must be a whole number"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000 must be at most 100000",
        ),
        ({"hidden_size": 10**400}, "hidden_size=10^400 must be at most 1099511627776"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be a whole"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or"),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "top_k=9 must be at most num_experts=8",
        ),
        (
            {"model_type": "opt", "ffn_dim": 8, "_remove_final_layer_norm": True},
            "_remove_final_layer_norm=True is not supported, only False",
        ),
        (
            {"model_type": "opt", "ffn_dim": 8, "word_embed_proj_dim": 16},
            "word_embed_proj_dim=16 is not supported, only 32",
        ),
        (
            {"model_type": "deepseek_v3", "attention_bias": True},
            "attention_bias=True is not supported, only False",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention"]},
            "layer_types names 1 layers of 2",
        ),
    ],
)
def test_unsupported_configs_are_refused(
    change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    with refused(line, "config.json: "):
        load_shape(path)


def test_a_description_refuses_layers_that_do_not_match() -> None:
    model = describe("mistral-7b")
    with pytest.raises(ValueError, match="3 windows for"):
        dataclasses.replace(model, windows=(1, 2, 3))
    with pytest.raises(ValueError, match="without experts"):
        dataclasses.replace(model, mixture_layers=(True,))
    with pytest.raises(ValueError, match="shared_size=-1"):
        MixtureShape(num_experts=2, top_k=1, size=3, shared_size=-1)
    assert isinstance(hash(model), int)
    assert isinstance(model, ModelShape)


@pytest.mark.thorough
def test_folders_of_all_families_have_the_counted_size() -> None:
    folders = sorted(path.parent for path in GOLDEN.glob("*/config.json"))
    assert len(folders) > 25
    for folder in folders:
        config = read_config(folder)
        if config.has_special_layers:
            with pytest.raises(ValueError, match="is not counted"):
                load_shape(folder)
            continue
        shapes = param_shapes(config)
        sizes = [x.size for x in jax.tree.leaves({**shapes, "ahead": {}})]
        assert count_parameters(load_shape(folder)).total == sum(sizes), folder.name
