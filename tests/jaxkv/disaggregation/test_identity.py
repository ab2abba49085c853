"""Identity of workers: each part that decides an answer changes it, others do not."""

import asyncio
import dataclasses
import functools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv import Engine, Speculation
from jaxkv.disaggregation import Router, digests, identity
from jaxkv.disaggregation.identity import engine_identity
from jaxkv.engine import EngineParts, EngineRules
from jaxkv.parallel import make_mesh
from jaxkv.scheduling import static
from jaxkv.speculation import NGram, Rejection, SharedNoiseVerifier, Typical
from tests.support import engines
from tests.support.folders import TOKENIZED
from tests.support.scripted_workers import DECODE, ScriptedLauncher, ScriptedWorker

ENGINE: dict[str, Any] = vars(engines.SERVED) | {"prefix_cache": True}


def edit(name: str, **fields: Any) -> Callable[[Path], None]:
    """Returns a change of fields of a JSON file, which may be missing."""

    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | fields))

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    """Returns a change that writes a file."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def change_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors")


def change_token(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(document))


def load(folder: Path, **fields: Any) -> dict[str, str]:
    return engine_identity(Engine.load(folder, **ENGINE | fields))


def copy_model(folder: Path, change: Callable[[Path], None] | None = None) -> Path:
    shutil.copytree(TOKENIZED, folder)
    if change is not None:
        change(folder)
    return folder


@functools.cache
def plain(**fields: Any) -> dict[str, str]:
    """Identity of the unchanged model."""
    return load(TOKENIZED, **fields)


def changed_fields(changed: dict[str, str], **fields: Any) -> set[str]:
    before = plain(**fields)
    assert changed.keys() == before.keys()
    return {name for name, value in changed.items() if value != before[name]}


SCALED = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (edit("generation_config.json", eos_token_id=[1, 7]), {"end_tokens"}),
        (edit("config.json", eos_token_id=7), {"end_tokens"}),
        (edit("config.json", rms_norm_eps=1e-5), {"model"}),
        (edit("config.json", rope_parameters=SCALED), {"model"}),
        (edit("config.json", max_position_embeddings=64), {"model"}),
        (change_weight, {"weights"}),
        (change_token, {"tokenizer"}),
        (edit("tokenizer_config.json", chat_template="x"), {"tokenizer"}),
        (
            edit("tokenizer_config.json", clean_up_tokenization_spaces=True),
            {"tokenizer"},
        ),
        (edit("special_tokens_map.json", pad_token="<|end|>"), {"tokenizer"}),
        (write("chat_template.jinja", "x"), {"tokenizer"}),
        (write("additional_chat_templates/tool.jinja", "x"), {"tokenizer"}),
        # What decides no answer.
        (edit("generation_config.json", eos_token_id=1), set()),
        (edit("generation_config.json", transformers_version="4.0.0"), set()),
        (edit("config.json", _name_or_path="/a/path", use_cache=False), set()),
        (edit("tokenizer_config.json", name_or_path="/a/path"), set()),
        (write("README.md", "x"), set()),
        (write("other.safetensors", "x"), set()),
        (lambda folder: None, set()),
    ],
)
def test_a_change_of_a_folder_changes_the_identity_if_it_changes_answers(
    tmp_path: Path, change: Callable[[Path], None], fields: set[str]
) -> None:
    assert changed_fields(load(copy_model(tmp_path / "model", change))) == fields


def add_one(logits: Any, *_: Any) -> Any:
    return logits + 1


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"dtype": "bfloat16"}, {"dtype", "layout"}),
        ({"kv_dtype": "int8"}, {"layout"}),
        ({"page_size": 8}, {"page_size", "layout"}),
        ({"numerics": "reproducible"}, {"numerics"}),
        ({"logits_fn": add_one}, {"logits_fn"}),
        # What decides no answer.
        ({"max_slots": 2, "num_pages": 40, "max_sequences": 9}, set()),
        ({"steps_per_call": 3, "policy": static(), "scan_layers": True}, set()),
        ({"speculate": "ngram", "max_drafts": 3}, set()),
    ],
)
def test_an_argument_changes_the_identity_if_it_changes_answers(
    arguments: dict[str, Any], fields: set[str]
) -> None:
    assert changed_fields(load(TOKENIZED, **arguments)) == fields


def test_reproducible_numerics_compare_devices() -> None:
    numerics = {"numerics": "reproducible"}
    small = load(TOKENIZED, **numerics, max_slots=2, num_pages=40)
    assert changed_fields(small, **numerics) == set()
    scanned = load(TOKENIZED, **numerics, scan_layers=True)
    assert changed_fields(scanned, **numerics) == {"numerics"}
    divided = load(TOKENIZED, **numerics, mesh=make_mesh(tensor=2))
    assert changed_fields(divided, **numerics) == {"numerics"}
    # Fast numerics may differ at near ties in any batch.
    assert changed_fields(load(TOKENIZED, mesh=make_mesh(tensor=2))) == set()
    with jax.default_matmul_precision("bfloat16"):
        assert changed_fields(load(TOKENIZED)) == {"precision"}


def test_the_weights_of_drafts_and_lossy_verifiers_are_compared(tmp_path: Path) -> None:
    def drafted(folder: Path) -> dict[str, str]:
        how = jaxkv.SpeculationConfig("draft-model", draft_folder=folder)
        return load(TOKENIZED, speculate=how, max_drafts=3)

    other = copy_model(tmp_path / "draft", change_weight)
    turned = copy_model(tmp_path / "rope", edit("config.json", rope_parameters=SCALED))
    folders = TOKENIZED, copy_model(tmp_path / "equal"), other, turned
    first, equal, *different = (drafted(folder)["drafts"] for folder in folders)
    assert first == equal
    assert len({first, *different}) == 3
    drafting: dict[str, Any] = ENGINE | {"max_drafts": 3}
    engine = Engine.load(TOKENIZED, **drafting, speculate="ngram")

    def verified(verifier: Any) -> str:
        engine.rules = EngineRules(speculation=Speculation(NGram(), verifier))
        return engine_identity(engine)["speculation"]

    verifiers = [Typical(), Typical(epsilon=0.2), Typical(delta=0.2), Rejection()]
    speculations = [*map(verified, verifiers), verified(SharedNoiseVerifier())]
    assert len({*speculations}) == len(speculations)
    assert verified(Typical()) == speculations[0]
    assert speculations[-1] == plain()["speculation"]


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float = 1.0
    ids: tuple[int, ...] = (1,)

    def __call__(self, logits: Any, *_: Any) -> Any:
        return logits * self.factor


class Pair(NamedTuple):
    factor: float = 1.0

    def __call__(self, logits: Any, *_: Any) -> Any:
        return logits * self.factor


class Rule:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, logits: Any, *_: Any) -> Any:
        return logits * self.factor


def shifted(shift: Any, *, bound: int = 3) -> Callable[..., Any]:
    def change(logits: Any, *_: Any) -> Any:
        return jnp.where(jnp.arange(logits.shape[-1]) < bound, logits + shift, logits)

    return change


class BySign:
    """Two classes of this text differ in `flip` only."""

    def __call__(self, logits: Any, *_: Any) -> Any:
        return self.flip(logits)

    def flip(self, logits: Any) -> Any:
        return -logits


OtherSign = type("BySign", (BySign,), {"flip": lambda self, logits: logits})


@pytest.mark.parametrize(
    ("first", "equal", "different"),
    [
        (shifted(1.0), shifted(1.0), shifted(2.0)),
        (shifted(1.0), shifted(1.0), shifted(1)),
        (shifted(1.0), shifted(1.0), shifted(1.0, bound=4)),
        (shifted(0.0), shifted(0.0), shifted(-0.0)),
        (shifted(np.arange(3)), shifted(np.arange(3)), shifted(np.arange(3) + 1)),
        (
            shifted(jnp.ones(3)),
            shifted(jnp.ones(3)),
            shifted(jnp.ones(3, jnp.bfloat16)),
        ),
        (shifted({1: 2, 3: 4}), shifted({3: 4, 1: 2}), shifted({1: 4, 3: 2})),
        (jax.jit(shifted(1.0)), jax.jit(shifted(1.0)), jax.jit(shifted(2.0))),
        (
            functools.partial(add_one, 1),
            functools.partial(add_one, 1),
            functools.partial(add_one, 2),
        ),
        (Scale(), Scale(), Scale(2.0)),
        (Scale(), Scale(), Scale(ids=(2,))),
        (Pair(), Pair(), Pair(2.0)),
        (Rule(1.0).apply, Rule(1.0).apply, Rule(2.0).apply),
        (BySign(), BySign(), OtherSign()),
        (lambda x: x.at["a"], lambda x: x.at["a"], lambda x: x.at["b"]),
    ],
)
def test_functions_are_compared_by_content(
    first: Any, equal: Any, different: Any
) -> None:
    digest = functools.partial(digests.digest_value, "logits_fn")
    assert digest(first) == digest(equal)
    assert digest(first) != digest(different)


FACTOR = 1.0


def scaled(logits: Any) -> Any:
    return logits * FACTOR


def test_globals_of_a_function_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def outer(logits: Any, *_: Any) -> Any:
        return scaled(logits)

    before = digests.digest_value("logits_fn", outer)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert digests.digest_value("logits_fn", outer) != before


def test_functions_without_content_need_a_name() -> None:
    function: Any = shifted(threading.Lock())
    with pytest.raises(ValueError, match=r"logits_fn cannot be .* a _thread\.lock.*"):
        digests.digest_value("logits_fn", function)
    function.identity = "version 1"
    first = digests.digest_value("logits_fn", function)
    function.identity = "version 2"
    assert digests.digest_value("logits_fn", function) != first
    parts = EngineParts(
        engines.params(),
        engines.PagedForward(engines.MODEL),
        engines.make_model_pages(engines.MODEL, engines.CACHED),
        engines.CACHED,
    )
    engine = Engine(parts)
    with pytest.raises(ValueError, match="an engine without a folder has no identity"):
        engine_identity(engine)


def test_a_router_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    def prepare(worker: ScriptedWorker) -> None:
        worker.described = {"identity": plain()}

    async def start(folder: Path) -> None:
        tokenizer = jaxkv.models.load_tokenizer(folder)
        router = Router(ScriptedLauncher(prepare), tokenizer=tokenizer)
        try:
            await router.start([DECODE])
        finally:
            await router.close()

    asyncio.run(start(TOKENIZED))
    other = copy_model(tmp_path / "model", write("chat_template.jinja", "x"))
    with pytest.raises(ValueError, match="must serve one model: tokenizer='"):
        asyncio.run(start(other))


def test_differences_are_described() -> None:
    fields = plain()
    assert identity.describe_difference(dict(fields), fields) is None
    changed = fields | {"end_tokens": "[1, 7]"}
    line = identity.describe_difference(changed, fields)
    assert line == "end_tokens='[1, 7]' must be '[1]'"
