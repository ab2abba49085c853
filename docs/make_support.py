"""Writes `support.md`: every pair of options, accepted or refused by the engine itself.

Each cell is the result of `Engine.load` with both options and of one request, on small
models with random weights; no program is compiled. A refusal is the line of its
`ValueError`. With `--trace` other errors of the step's functions end the script.

    python docs/make_support.py            # writes docs/support.md
    python docs/make_support.py --check    # compares it
    python docs/make_support.py --trace    # also traces the step of accepted pairs
"""

import argparse
import dataclasses
import itertools
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv import speculation
from jaxkv.models import WeightFormat, checkpoints, quantize_params, transformer
from jaxkv.models.config import Experts, LatentConfig, ModelConfig
from jaxkv.models.huggingface import configs, families
from jaxkv.parallel import make_mesh, tensor
from jaxkv.sampling import Grammar
from jaxkv.serving import loading
from jaxkv.speculation import head_folders
from jaxkv.text.tokenizer import ByteTokenizer
from scaling.shapes import describe_huggingface

PAGE = Path(__file__).parent / "support.md"
ACCEPTED = "yes"
SAME_OPTION = "-"
"""Cell of two values of one option, which cannot be combined."""

DENSE = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=24,
    max_positions=64,
)
MODELS = {
    "dense": DENSE,
    "mixture": dataclasses.replace(
        DENSE, experts=Experts(num_experts=4, top_k=2, size=24), family="mixtral"
    ),
    "window": dataclasses.replace(DENSE, window=32, family="mistral"),
    "learned": dataclasses.replace(
        DENSE,
        num_kv_heads=4,
        norm="layer",
        positions="learned",
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        family="gpt2",
    ),
    "latent": dataclasses.replace(
        DENSE,
        num_kv_heads=4,
        head_dim=12,
        norm_eps=1e-6,
        tie_embeddings=False,
        latent=LatentConfig(kv_rank=16, q_rank=14, nope_dim=8, rope_dim=4, value_dim=6),
        experts=Experts(
            num_experts=4,
            top_k=2,
            size=24,
            shared_size=24,
            scoring="sigmoid",
            gate_bias=True,
            num_dense_layers=1,
        ),
        num_ahead_layers=1,
        family="deepseek_v3",
    ),
}
GRAMMAR = Grammar.from_regex("[a-z]+", ByteTokenizer(257))
BOUNDS: dict[str, Any] = {"num_pages": 16, "max_slots": 4, "max_length": 64}


@dataclasses.dataclass(frozen=True)
class Option:
    """A named setting: arguments of `Engine.load`, a model, and a request that uses it.

    Two options with different values of one argument cannot be combined.
    """

    name: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    request: dict[str, Any] = dataclasses.field(default_factory=dict)

    def join(self, other: "Option") -> "Option | None":
        """Returns both options as one, or None if they set one argument twice."""
        for mine, theirs in (
            (self.fields, other.fields),
            (self.request, other.request),
        ):
            if any(mine[key] != theirs[key] for key in mine.keys() & theirs.keys()):
                return None
        return Option(
            f"{self.name}, {other.name}",
            self.fields | other.fields,
            self.request | other.request,
        )


def unchanged(answer: jaxkv.TokenHistory, logits: jax.Array) -> jax.Array:
    """Returns the logits: the smallest `logits_fn`."""
    return logits


class UntunedEngine(jaxkv.Engine):
    """An engine that accepts adaptive speculation without measuring step costs."""

    def tune(self, context: int | None = None) -> None:
        """Measures no step, so that no program is compiled."""


def save_models(folder: Path) -> None:
    """Saves all models, and drafting heads of both kinds for each."""
    rng = np.random.default_rng(0)
    for name, config in MODELS.items():
        params = transformer.init_params(config, jax.random.key(0))
        tokenizer = ByteTokenizer(256)
        checkpoints.save_model(folder / name, config, params, tokenizer=tokenizer)
        save_adapter(folder / f"{name}-lora", folder / name)
        for heads in (
            speculation.MedusaConfig(target=config, num_heads=2),
            speculation.EagleConfig(target=config, taps=(0, 1, 2)),
        ):
            kind = head_folders.heads_kind(heads)
            random = jax.tree.map(
                lambda x: rng.normal(size=x.shape).astype("float32"),
                heads.param_shapes(),
            )
            head_folders.save_heads(
                folder / f"{name}-{kind}",
                heads,
                random,
                acceptance=[[0.5, 0.25], [0.5, 0.125]],
                model_card="",
            )


def save_adapter(folder: Path, model: Path) -> None:
    """Saves an adapter of the first layer's output projection of attention."""
    weights = load_file(model / "model.safetensors")
    [name] = [
        x.removesuffix(".weight")
        for x in weights
        if re.search(r"\.0\.(self_attn\.o_proj|attn\.c_proj)\.weight$", x)
    ]
    weight = weights[f"{name}.weight"]
    prefix = f"base_model.model.{name}.lora_"
    halves = {"A": weight[:2].copy(), "B": weight[:, :2].copy()}
    halves = {f"{prefix}{half}.weight": x for half, x in halves.items()}
    folder.mkdir()
    save_file(halves, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [name]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def add_module(
    loaded: checkpoints.LoadedModel,
    model: str,
    *,
    dtype: str,
    weights: WeightFormat,
    mesh: Mesh | None,
) -> checkpoints.LoadedModel:
    """Adds a module for multi-token prediction to a model without one."""
    if loaded.config.num_ahead_layers:
        return loaded
    config = dataclasses.replace(MODELS[model], num_ahead_layers=1)
    params = transformer.init_params(config, jax.random.key(0), dtype=dtype)
    params = quantize_params(params, weights)
    if mesh is not None:
        params = tensor.place_params(config, params, mesh)
    config = dataclasses.replace(loaded.config, num_ahead_layers=1)
    return loaded._replace(config=config, params=params)


class Trials:
    """Tries options, and numbers the refusals."""

    def __init__(self, folder: Path, *, trace: bool = False):
        """Prepares trials of the models in `folder`; `trace` also traces the steps."""
        self._folder = folder
        self.trace = trace
        self._lines: dict[str, str] = {}
        self._loaded: dict[Any, checkpoints.LoadedModel] = {}
        self.refusals: list[str] = []
        """Lines of the refusals, in the order of their first occurrence."""

    def refusal(self, option: Option) -> str:
        """Returns the line with which an engine or its request is refused, or ""."""
        key = repr((option.fields, option.request))
        if key not in self._lines:
            self._lines[key] = self._try(option)
        return self._lines[key]

    def _try(self, option: Option) -> str:
        fields = BOUNDS | option.fields
        model = fields.pop("model", "dense")
        if fields.pop("lora", False):
            fields["adapters"] = {"lora": self._folder / f"{model}-lora"}
        method = fields.pop("method", None)
        if method is not None:
            fields["speculate"] = self._speculation(model, method)
        mesh = fields.pop("mesh", None)
        try:
            fields["mesh"] = None if mesh is None else make_mesh(**dict(mesh))
            folder = self._folder / model
            kind = {"dtype": "float32", "weights": "model"} | fields
            kind = {name: kind[name] for name in ("dtype", "weights", "mesh")}
            key = model, mesh, kind["dtype"], kind["weights"], method == "mtp"
            if key not in self._loaded:
                loaded = loading.read_model_folder(folder, **kind)
                if method == "mtp":
                    loaded = add_module(loaded, model, **kind)
                self._loaded[key] = loaded
            engine = UntunedEngine.load(folder, loaded=self._loaded[key], **fields)
            engine.submit("text", jaxkv.Sampling(max_tokens=4, **option.request))
            if self.trace:
                engine.lower()
        except ValueError as error:
            return str(error).replace(str(self._folder), "FOLDER")
        return ""

    def _speculation(self, model: str, method: str) -> speculation.SpeculationConfig:
        how: dict[str, Any] = {"method": method.removeprefix("adaptive ")}
        how["adaptive"] = method.startswith("adaptive ")
        if how["method"] == "draft-model":
            how["draft_folder"] = self._folder / model
        if how["method"] in head_folders.HEAD_KINDS:
            how["heads_folder"] = self._folder / f"{model}-{how['method']}"
        return speculation.SpeculationConfig(**how)

    def cell(self, line: str) -> str:
        """Returns a cell: accepted, or the number of the refusal."""
        if not line:
            return ACCEPTED
        if line not in self.refusals:
            self.refusals.append(line)
        return f"no ({self.refusals.index(line) + 1})"

    def table(self, rows: Sequence[Option], columns: Sequence[Option]) -> list[str]:
        """Returns the table of all pairs."""
        lines = [["", *(x.name for x in columns)]]
        for row in rows:
            cells = [row.name]
            for column in columns:
                both = row.join(column)
                refused = None if both is None else self.refusal(both)
                cells.append(SAME_OPTION if refused is None else self.cell(refused))
            lines.append(cells)
        return markdown_table(lines)


def markdown_table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table; the first line is its head."""
    head, *rest = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    rule = ["---"] * len(head)
    return [f"| {' | '.join(line)} |" for line in (head, rule, *rest)]


def mesh_option(**degrees: int) -> Option:
    """Returns the option of a mesh; experts are divided in the mixture."""
    name = ", ".join(f"`{key}={value}`" for key, value in degrees.items())
    fields: dict[str, Any] = {"mesh": tuple(degrees.items())}
    if "expert" in degrees:
        fields["model"] = "mixture"
    return Option(name, fields)


NUMERICS = [Option("`reproducible`", {"numerics": "reproducible"})]
KV_DTYPES = [Option(f"`{x}`", {"kv_dtype": x}) for x in ("int8", "fp8")]
MESHES = [mesh_option(tensor=2), mesh_option(context=2), mesh_option(expert=2)]
METHODS = [Option(f"`{x}`", {"method": x}) for x in speculation.methods.METHOD_NAMES]
ADAPTIVE = [
    Option(f"`{x}`", {"method": x}) for x in ("adaptive ngram", "adaptive eagle")
]
KINDS = [
    Option("mixture of experts", {"model": "mixture"}),
    Option("sliding window", {"model": "window"}),
    Option("learned positions", {"model": "learned"}),
    Option("latent attention (DeepSeek-V3)", {"model": "latent"}),
]
FEATURES = [
    Option("prefix cache", {"prefix_cache": True}),
    Option("swapping", {"max_swap_pages": 4}),
    Option("beam search", {"max_beams": 2}, {"beam_width": 2}),
    Option("log-probabilities", {"max_logprobs": 2}, {"logprobs": 2}),
    Option(
        "prompt log-probabilities", {"max_logit_rows": 8}, {"prompt_logprobs": True}
    ),
    Option("`logits_fn`", {"logits_fn": unchanged}),
    Option("grammar", {"max_grammars": 1}, {"grammar": GRAMMAR}),
    Option("`evict=snapkv`", {"evict": "snapkv", "evict_budget": 48}),
    Option("`scan_layers`", {"scan_layers": True}),
    Option("`dtype=bfloat16`", {"dtype": "bfloat16"}),
    Option("LoRA adapters", {"lora": True}, {"adapter": "lora"}),
    Option("`weights=int8`", {"weights": "int8"}),
    Option("`weights=nvfp4`", {"weights": "nvfp4"}),
]
PLAIN = Option("none of the other options")

REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("`n=5`", {"n": 5}, {"max_slots": 5}),
    ("`beam_width=2`", {"beam_width": 2}, {"max_beams": 2}),
    ("`logprobs=2`", {"logprobs": 2}, {"max_logprobs": 2}),
    ("`prompt_logprobs=True`", {"prompt_logprobs": True}, {"max_logit_rows": 8}),
    ("`grammar=...`", {"grammar": GRAMMAR}, {"max_grammars": 1}),
    ("5 stop tokens", {"stop_tokens": (1, 2, 3, 4, 5)}, {"max_stop_tokens": 6}),
]
"""Requests, their sampling parameters, and bounds of `Engine.load` that they need."""

SIZES = [
    mesh_option(tensor=3),
    mesh_option(context=3),
    Option("`expert=2` without experts", {"mesh": (("expert", 2),)}),
    Option("`expert=3`", {"mesh": (("expert", 3),), "model": "mixture"}),
    Option(
        "`context=2`, window 32, `page_size=64`",
        {"mesh": (("context", 2),), "model": "window", "page_size": 64},
    ),
    Option(
        "learned positions, `max_length=65`", {"model": "learned", "max_length": 65}
    ),
]


def pair_table(trials: Trials) -> list[str]:
    """Returns the table of drafters and verifiers."""
    verifiers = [
        speculation.SharedNoiseVerifier(),
        speculation.Rejection(),
        speculation.Typical(),
        speculation.Synthetic(0.5),
    ]
    eagle = speculation.EagleConfig(target=DENSE, taps=(2,))
    drafters: list[Any] = [
        speculation.NGram(),
        speculation.DraftModel(unchanged),
        speculation.Eagle(eagle, (1,), 1),
        speculation.Jacobi(),
        speculation.Lookahead(),
        speculation.Adaptive(speculation.NGram()),
        speculation.Adaptive(speculation.Jacobi()),
    ]
    lines = [["", *(f"`{type(x).__name__}`" for x in verifiers)]]
    for drafter in drafters:
        name = type(drafter).__name__
        if isinstance(drafter, speculation.Adaptive):
            name += f"({type(drafter.drafter).__name__}())"
        cells = [f"`{name}`"]
        for verifier in verifiers:
            line = error_of(jaxkv.Speculation, drafter, verifier)
            line = re.sub(r"drafter=.*?: it", "drafter=...: it", line)
            cells.append(trials.cell(line))
        lines.append(cells)
    return markdown_table(lines)


def error_of(function: Callable[..., Any], *values: Any) -> str:
    """Returns the line of the `ValueError` that a call raises, or ""."""
    try:
        function(*values)
    except ValueError as error:
        return str(error)
    return ""


def request_table(trials: Trials) -> list[str]:
    """Returns the table of requests that need a bound of the engine."""
    lines = [["`Sampling(...)`", "with the defaults", "with", ""]]
    for name, request, bounds in REQUESTS:
        default, allowed = (
            trials.refusal(Option(name, fields, request)) for fields in ({}, bounds)
        )
        shown = ", ".join(f"`{key}={value}`" for key, value in bounds.items())
        lines.append([name, trials.cell(default), shown, trials.cell(allowed)])
    return markdown_table(lines)


def family_table(trials: Trials) -> list[str]:
    """Returns the table of model families."""
    lines = [["`model_type`", "architecture", "served", "counted"]]
    for name, family in families.FAMILIES.items():
        raw = {"architectures": [family.architecture], "model_type": name}
        line = error_of(configs.from_hf, raw)
        # Other messages name a missing key of an architecture that is served.
        refused = line if line.startswith("architecture ") else ""
        if bool(refused) == family.servable:
            raise AssertionError(f"{name}: {family.servable=}, but {line}")
        line = error_of(describe_huggingface, raw)
        served = trials.cell(refused.replace(family.architecture, "..."))
        counted = trials.cell(line if "is not counted" in line else "")
        lines.append([f"`{name}`", f"`{family.architecture}`", served, counted])
    return markdown_table(lines)


def check_full_products(trials: Trials) -> tuple[int, int]:
    """Checks that pairs decide: a combination is refused if, and only if, a pair is.

    Returns:
      Numbers of combinations, and of refused ones, of a model, numerics, KV dtype,
      mesh and speculation method.

    Raises:
      AssertionError: the table of pairs would mislead.
    """
    num = num_refused = 0
    axes = (KINDS, NUMERICS, KV_DTYPES, MESHES, METHODS)
    for options in itertools.product(*([PLAIN, *axis] for axis in axes)):
        joined: Option | None = PLAIN
        for option in options:
            joined = None if joined is None else joined.join(option)
        if joined is None:
            continue
        pairs = [a.join(b) for a, b in itertools.combinations(options, 2)]
        expected = any(trials.refusal(pair) for pair in pairs if pair is not None)
        refused = bool(trials.refusal(joined))
        if refused != expected:
            raise AssertionError(f"{joined.name}: {trials.refusal(joined)!r}")
        num = num + 1
        num_refused = num_refused + refused
    return num, num_refused


def make_page(*, trace: bool = False) -> str:
    """Returns the page.

    Raises:
      AssertionError: the tables of pairs do not describe all combinations.
    """
    # Three devices of a CPU, unless JAX has started with more.
    if len(jax.devices()) < 3:
        raise RuntimeError("the meshes of the page need 3 devices")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_models(Path(folder))
        trials = Trials(Path(folder), trace=trace)
        tables = {
            "numerics": trials.table(
                [PLAIN, *NUMERICS, *KV_DTYPES, *METHODS, *ADAPTIVE, *KINDS, *FEATURES],
                [*NUMERICS, *KV_DTYPES, *MESHES],
            ),
            "speculation": trials.table([*METHODS, *ADAPTIVE], [*KINDS, *FEATURES]),
            "features": trials.table(FEATURES, [*KINDS, *FEATURES]),
            "pairs": pair_table(trials),
            "requests": request_table(trials),
            "sizes": markdown_table(
                [["", ""], *([x.name, trials.cell(trials.refusal(x))] for x in SIZES)]
            ),
            "families": family_table(trials),
        }
        trials.trace = False
        num, num_refused = check_full_products(trials)
    text = TEMPLATE
    for name, table in tables.items():
        text = text.replace(f"@{name}@", "\n".join(table))
    lines = [f"{i}. `{line}`" for i, line in enumerate(trials.refusals, 1)]
    text = text.replace("@refusals@", "\n".join(lines))
    return text.replace("@num@", f"{num:,}").replace("@refused@", f"{num_refused:,}")


TEMPLATE = """\
# Support matrix

This page is generated by `python docs/make_support.py`. Each cell is the result of a call: an engine is loaded with both options, and one request is submitted. `yes` means that both are accepted. `no (k)` means that the call raises a `ValueError` with line k of [the list below](#refusals). `-` marks two values of one option. A test compares this page with the code.

The models of the trials have two layers, 4 query heads, 2 KV heads and random weights, and no step is compiled: the page shows which combinations the interface accepts. The model of the family DeepSeek-V3 has latent attention, shared and routed experts with a selection bias, and a module for multi-token prediction. The [records](records.md) show which ones were measured.

## Numerics, KV dtype and mesh

Rows are combined with `numerics="reproducible"`, with `kv_dtype`, and with a mesh of two devices (`Engine.load(..., mesh=make_mesh(tensor=2))`). The column `expert=2` uses a mixture of experts.

@numerics@

Pairs decide: of @num@ combinations of a model, numerics, KV dtype, mesh and speculation method, @refused@ are refused, and each of these contains a pair that is refused.

## Speculation with models and features

Rows are values of `speculate=`. `medusa`, `eagle` and `draft-model` need a folder of heads or of a draft model, trained for the served model; `mtp` needs a model with a module for multi-token prediction, as all models of its trials have. Beam searches run in an engine with speculation, but without drafts.

@speculation@

## Features with models and features

@features@

## Drafters and verifiers

`Engine.load(speculate=...)` always uses `SharedNoiseVerifier`. The constructor `Engine(parts, EngineRules(speculation=Speculation(drafter, verifier)))` takes other pairs.

@pairs@

## Requests that need a bound

The shapes of an engine are fixed when it is loaded, so some requests need a larger bound than the default. The engines here have `max_slots=4`.

@requests@

## Sizes

@sizes@

## Model families

`served`: `Engine.load` reads the family. `counted`: `jaxkv cost` computes its parameters, FLOPs and bytes. Any other architecture is served as a forward pass of your own, see [A model family with new arithmetic](tutorials/model_family.md).

@families@

## Latent attention

The rows of latent attention (DeepSeek-V2 and V3) are one KV head of `kv_lora_rank + qk_rope_head_dim` numbers. Forward passes on a CPU use the reference for all of them. On a Hopper GPU under fast numerics, steps that only decode use the decode kernel for rows of 512 + 64 numbers in 16 bits; steps with chunks of prompts, other sizes, 8-bit pages and `reproducible` numerics use the reference.

## Refusals

@refusals@
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the page; returns 1 if the check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("--trace", action="store_true", help="trace accepted steps")
    chosen = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 3)
    page = make_page(trace=chosen.trace)
    if chosen.check:
        return int(page != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
