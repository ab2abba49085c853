"""Weights in 8 and 4 bits: formats, published folders, products, and engines."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv import models, scoring
from jaxkv.models import (
    QuantizedWeight,
    init_params,
    load_model,
    quantize_params,
    save_model,
)
from jaxkv.models.huggingface import configs
from jaxkv.models.layers import linear, quantized
from jaxkv.parallel import make_mesh
from jaxkv.sampling import Sampling
from jaxkv.serving import read_model_folder
from pallas_kernels.bench import compile_function, unavailable_reason
from scaling.costs.serving import weight_bytes_read
from scaling.shapes import describe_config
from tests.support import engines

FORMATS = ("int8", "fp8", "mxfp4", "nvfp4")
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
WIDE = dataclasses.replace(engines.MODEL, hidden_size=32, mlp_size=160)
TOKENS = jnp.arange(40, dtype=jnp.int32).reshape(2, 20)


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedWeight)


def slow(*values: str) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def e4m3(byte: int) -> float:
    """Decodes a number by its definition."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = (
        mantissa / 8 * 2**-6
        if not exponent
        else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    return -size if byte & 128 else size


def slow_number(weight: Any, row: int, column: int) -> float:
    """Decodes one number of a matrix `[out, in]`, from plain Python numbers."""
    if weight.format == "int8":
        number = int(weight.codes[row, column])
    elif weight.format == "fp8":
        number = e4m3(int(weight.codes[row, column]))
    else:
        byte = int(weight.codes[row, column // 2])
        nibble = byte >> 4 if column % 2 else byte & 15
        number = E2M1[nibble & 7] * (-1) ** (nibble >> 3)
    if weight.block_scale is not None:
        size = weight.shape[1] // weight.block_scale.shape[1]
        scale = weight.block_scale[row, column // size]
        if weight.format == "mxfp4":
            scale = 2.0 ** (int(scale) - 127)
        elif weight.format == "nvfp4":
            scale = e4m3(int(scale))
        number *= float(scale)
    return number * (1 if weight.row_scale is None else float(weight.row_scale[row, 0]))


def slow_matrix(weight: Any) -> np.ndarray:
    return np.array(
        [
            [slow_number(weight, row, column) for column in range(weight.shape[1])]
            for row in range(weight.shape[0])
        ]
    )


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_product_is_that_of_the_numbers(weight_format: Any) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(70, 96)).astype(np.float32)
    w[3] = 0
    w[5, :40] *= 1e-3
    weight = quantized.quantize_weight(w, weight_format)
    numbers = slow_matrix(weight)
    # Half a step of the largest numbers of a block; 4 bits in e8m0 also saturate.
    bound = {"int8": 1 / 254, "fp8": 1 / 28, "mxfp4": 1 / 4, "nvfp4": 1 / 5}
    assert (
        np.abs(numbers - w) <= bound[weight_format] * np.abs(w).max(1)[:, None]
    ).all()
    np.testing.assert_allclose(weight.dequantize(), numbers, rtol=1e-6)
    moved = quantized.quantize_weight(w.T, weight_format, axis=-2)
    np.testing.assert_array_equal(moved.dequantize(), np.asarray(weight.dequantize()).T)
    assert moved.shape == (96, 70)
    device = weight.map_parts(jnp.asarray)
    x = rng.normal(size=(96, 3)).astype(np.float32)
    y = jax.jit(linear.multiply_quantized)(device, x)
    np.testing.assert_allclose(y, numbers @ x, rtol=1e-4, atol=1e-4)


def test_odd_inputs_in_four_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="weights='mxfp4' needs even numbers of inp"):
        quantized.quantize_weight(np.ones((2, 5), np.float32), "mxfp4")


def publish(rng: Any, form: str, name: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Returns random tensors of one weight, as a quantizer publishes them."""
    rows, columns = shape
    prefix = name.removesuffix(".weight")

    def floats(*shape: int) -> Any:
        bits = rng.integers(30, 60, shape) + 128 * rng.integers(0, 2, shape)
        return bits.astype(np.uint8).view(jnp.float8_e4m3fn)

    def scales(*shape: int) -> Any:
        return rng.uniform(0.01, 0.1, shape).astype(np.float32)

    if form == "fp8 blocks":
        blocks = -(-rows // 128), -(-columns // 128)
        return {name: floats(*shape), f"{name}_scale_inv": scales(*blocks)}
    if form in ("fp8 channel", "fp8 tensor"):
        size = (rows, 1) if form == "fp8 channel" else ()
        return {
            name: floats(*shape),
            f"{name}_scale": np.asarray(scales(*size), np.float32),
        }
    if form == "int8 channel":
        codes = rng.integers(-127, 128, shape, np.int8)
        return {name: codes, f"{name}_scale": scales(rows, 1) / 100}
    packed = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    block = np.abs(floats(rows, columns // 16).astype(np.float32)).astype(
        jnp.float8_e4m3fn
    )
    if form == "modelopt":
        return {
            name: packed,
            f"{name}_scale": block,
            f"{name}_scale_2": np.asarray(0.02, np.float32),
            f"{prefix}.input_scale": np.asarray(0.5, np.float32),
        }
    return {
        f"{prefix}.weight_packed": packed,
        f"{name}_scale": block,
        f"{prefix}.weight_global_scale": np.array([50], np.float32),
        f"{prefix}.input_global_scale": np.array([2], np.float32),
    }


def published_numbers(tensors: dict[str, Any], name: str) -> np.ndarray:
    """Dequantizes `publish` by the definition of each form."""
    prefix = name.removesuffix(".weight")
    codes = tensors.get(f"{prefix}.weight_packed", tensors.get(name))
    if codes.dtype != np.uint8:
        numbers = codes.astype(np.float32)
        if f"{name}_scale" in tensors:
            return numbers * tensors[f"{name}_scale"]
        factors = tensors[f"{name}_scale_inv"]
        for axis, size in enumerate(numbers.shape):
            factors = np.repeat(factors, 128, axis).take(range(size), axis)
        return numbers * factors
    table = np.array([*E2M1, *(-x for x in E2M1)], np.float32)
    pairs = np.stack([table[codes & 15], table[codes >> 4]], -1)
    numbers = pairs.reshape(*tensors[f"{name}_scale"].shape, 16)
    numbers = numbers * tensors[f"{name}_scale"].astype(np.float32)[..., None]
    numbers = numbers.reshape(len(codes), -1)
    if f"{name}_scale_2" in tensors:
        return numbers * tensors[f"{name}_scale_2"]
    return numbers / tensors[f"{prefix}.weight_global_scale"]


COMPRESSED = {"quant_method": "compressed-tensors", "kv_cache_scheme": None}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
SETTINGS: dict[str, Any] = {
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 channel": COMPRESSED
    | {"format": "float-quantized", "config_groups": {"a": 1}},
    "fp8 tensor": MODELOPT | {"quant_algo": "FP8"},
    "int8 channel": COMPRESSED | {"format": "int-quantized"},
    "modelopt": MODELOPT,
    "compressed-tensors": COMPRESSED | {"format": "nvfp4-pack-quantized"},
}


def load_both(form: str, tmp_path: Path) -> tuple[Any, Any]:
    """Returns a published folder's quantized weights, and those as arrays; compares."""
    rng = np.random.default_rng(1)
    params = init_params(WIDE, jax.random.key(0))
    plain = save_model(tmp_path / "plain", WIDE, params)
    tensors = safetensors.numpy.load_file(plain / "model.safetensors")
    stored = {}
    for name, array in tensors.items():
        if "_proj" not in name:
            stored[name] = array
            continue
        stored |= (part := publish(rng, form, name, array.shape))
        tensors[name] = published_numbers(part, name)
    safetensors.numpy.save_file(tensors, plain / "model.safetensors")
    (plain / "SHA256SUMS").unlink()
    folder = tmp_path / "published"
    folder.mkdir()
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = SETTINGS[form]
    (folder / "config.json").write_text(json.dumps(raw))

    wanted = load_model(plain).params
    check = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)  # noqa: E731
    jax.tree.map(check, load_model(folder).params, wanted)
    weights: Any = form.split()[0] if " " in form else "nvfp4"
    small = load_model(folder, weights=weights).params
    leaves = [x for x in jax.tree.leaves(small, is_leaf=is_quantized)]
    assert sum(map(is_quantized, leaves)) == 4 * WIDE.num_layers
    numbers = [x.dequantize() if is_quantized(x) else x for x in leaves]
    for got, expected in zip(numbers, jax.tree.leaves(wanted), strict=True):
        check(got, expected)
    return small, wanted


@pytest.mark.parametrize("form", SETTINGS)
def test_a_published_folder_is_read_as_its_numbers(form: str, tmp_path: Path) -> None:
    load_both(form, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["modelopt", *slow("fp8 blocks", "int8 channel")])
def test_a_published_folder_has_the_dequantized_logits(
    form: str, tmp_path: Path
) -> None:
    logits = [
        models.logits(params, TOKENS, config=WIDE)
        for params in load_both(form, tmp_path)
    ]
    np.testing.assert_allclose(*logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' is not supported"),
        ({"quant_method": "awq"}, "quant_method='awq' is not supported, only fp8"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quantization_config is not support"),
        (COMPRESSED | {"format": "pack-quantized"}, "quantization_config is not supp"),
        (
            COMPRESSED
            | {"format": "int-quantized", "kv_cache_scheme": {"num_bits": 8}},
            "quantization_config is not supported: .* without a scheme for K and V",
        ),
    ],
)
def test_other_formats_are_refused(settings: Any, line: str) -> None:
    raw = configs.to_hf(engines.MODEL) | {"quantization_config": settings}
    with pytest.raises(ValueError, match=line):
        models.from_hf(raw)


def test_layers_are_quantized_and_nothing_else() -> None:
    params = engines.params()
    small = quantize_params(params, "int8")
    for path, leaf in jax.tree_util.tree_leaves_with_path(small, is_leaf=is_quantized):
        keys = [key.key for key in path]
        assert is_quantized(leaf) == (keys[0] == "layers" and keys[-1] == "weight"), (
            keys
        )
    assert models.weight_format(small) == "int8"
    assert models.add_transposed_weights(small) is small
    stacked = models.stack_layers(engines.MODEL, small)
    assert models.is_stacked(stacked)
    back = models.unstack_layers(engines.MODEL, stacked)
    jax.tree.map(np.testing.assert_array_equal, back, small)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "nvfp4"])
def test_an_engine_reports_the_bits_of_score(weights: Any) -> None:
    params = quantize_params(engines.params(), weights)
    bounds: Any = {"num_pages": 32, "page_size": 8, "max_slots": 2, "max_length": 48}
    loaded = models.LoadedModel(engines.MODEL, params, None, ())
    engine = jaxkv.Engine.load(
        "stdlib-bytes",
        loaded=loaded,
        weights=weights,
        numerics="reproducible",
        max_logprobs=1,
        **bounds,
    )
    asks = Sampling(max_tokens=12, temperature=1.0, seed=3, logprobs=1, ignore_eos=True)
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    for prompt, done in zip(prompts, engine.generate(prompts, asks), strict=True):
        tokens = np.array([[*prompt, *done.tokens]], np.int32)
        scores = jaxkv.score(params, tokens, config=engines.MODEL)[0, len(prompt) :]
        reported = np.asarray(done.logprobs, np.float32)
        np.testing.assert_array_equal(scores, reported)
    engine.set_params(engines.params())  # quantized as before
    assert models.weight_format(engine.params) == weights


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "nvfp4"])
def test_two_devices_have_the_logits_of_one(weights: Any, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", WIDE, init_params(WIDE, jax.random.key(2)))
    one = load_model(folder, weights=weights)
    mesh = make_mesh(tensor=2)
    two = read_model_folder(folder, dtype="float32", weights=weights, mesh=mesh)
    scores = [
        jaxkv.score(x.params, TOKENS, config=x.config, mesh=y)
        for x, y in ((one, None), (two, mesh))
    ]
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)


def test_the_cost_formula_counts_the_bytes_of_a_step() -> None:
    params = quantize_params(init_params(WIDE, jax.random.key(0)), "int8")
    read = WIDE.hidden_size * 4  # a row of the embeddings
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        if path[0].key != "embed":
            # The formula leaves the scales of outputs out.
            read += leaf.codes.nbytes if is_quantized(leaf) else leaf.nbytes
    shape = describe_config(WIDE)
    assert weight_bytes_read(shape, 1, weight_bytes=4, weights="int8") == read


def test_blocks_that_devices_cannot_share_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", WIDE, init_params(WIDE, jax.random.key(2)))
    line = r"tensor=2 must divide the 5 blocks of inputs of layers\.0\.down\.weight"
    mesh = make_mesh(tensor=2)
    with pytest.raises(ValueError, match=line):
        read_model_folder(folder, dtype="float32", weights="mxfp4", mesh=mesh)


@pytest.mark.slow
def test_the_cost_is_the_difference_of_scores() -> None:
    text = np.frombuffer(Path(scoring.__file__).read_bytes(), np.uint8)[:400]
    cost = scoring.weights_cost("stdlib-bytes", text, weights="nvfp4", max_length=100)
    assert cost.num_tokens == 4 * 99
    rows = jnp.asarray(text.reshape(4, 100), jnp.int32)
    plain = load_model("stdlib-bytes")
    means = []
    for params in (plain.params, quantize_params(plain.params, "nvfp4")):
        logits = jax.nn.log_softmax(models.logits(params, rows, config=plain.config))
        picked = jnp.take_along_axis(logits[:, :-1], rows[:, 1:, None], axis=-1)
        means.append(float(-picked.mean()))
    assert cost.nats_per_token == pytest.approx(means[0], abs=1e-4)
    assert cost.loss == pytest.approx(means[1] - means[0], abs=1e-4)
    assert 0 < cost.error < 0.05
    assert cost.quantized_bytes < 0.2 * cost.model_bytes


@pytest.mark.thorough
@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler for GPUs")
@pytest.mark.parametrize(
    ("weight_format", "num_rows"),
    [("int8", 1), ("int8", 64), ("fp8", 1), ("fp8", 8), ("mxfp4", 1), ("nvfp4", 1)],
)
def test_an_h200_stores_no_converted_weight(weight_format: Any, num_rows: int) -> None:
    size = 2048
    zeros = np.zeros((size, size), np.float32)
    weight = quantized.quantize_weight(zeros, weight_format, dtype="bfloat16")
    x = jax.ShapeDtypeStruct((size, num_rows), jnp.bfloat16)
    report = compile_function(linear.multiply_quantized, weight, x)
    entry = report.text[report.text.index("ENTRY") :]
    sizes = re.findall(r"\b(?:bf16|f16|f32|u16)\[([\d,]+)\]", entry)
    assert max(math.prod(map(int, x.split(","))) for x in sizes) < size * size / 2
