"""Identity of a served model: all that decides an answer, and the layout of its pages.

A request may move between two workers, and pages may be exchanged, only if every field
is equal. The fields come from the loaded engine, not from a list of its files: what the
loader made of a folder is what answers. Contents are hashed, not names or sizes, since
two trainings of one shape differ.
"""

from pathlib import Path

import jax

import jaxkv
from jaxkv.disaggregation import digests
from jaxkv.engine import EngineConfig
from jaxkv.memory import Pages
from jaxkv.models import read_config, weight_files
from jaxkv.serving import Engine
from jaxkv.speculation import SharedNoiseVerifier
from jaxkv.text import ByteTokenizer, Tokenizer

_ORIGINS = ("name_or_path", "tokenizer_file", "special_tokens_map_file")
"""Settings of tokenizers with the paths that they were once read from."""


def engine_identity(engine: Engine) -> dict[str, str]:
    """Returns the identity of an engine that `Engine.load` made.

    Scheduling, slots, pages, paths and lossless drafts are not part of it: they change
    no token, or under `numerics="fast"` near ties only. Under "reproducible" numerics
    the devices, which change the last bits, are.

    Raises:
      ValueError: the engine was not loaded from a folder, or `logits_fn` has a part
        without content that can be compared.
    """
    if (origin := engine.origin) is None:
        raise ValueError("an engine without a folder has no identity")
    config = engine.config
    numerics = config.numerics
    if numerics == "reproducible":
        mesh = {} if origin.mesh is None else dict(origin.mesh.shape)
        scan = f"scan_layers={origin.scan_layers}"
        numerics += f" on {jax.devices()[0].device_kind}, {mesh=}, {scan}"
    draft_files: list[Path] = []
    if (draft := origin.draft_folder) is not None:
        draft_files = [*weight_files(draft), draft / "config.json"]
    options = jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64
    speculation = engine.rules.speculation
    # With shared noise all drafts give the tokens of plain decoding.
    is_plain = speculation is None or isinstance(
        speculation.verifier, SharedNoiseVerifier
    )
    deciding = {
        # The engine's own shape may be divided over a mesh.
        "model": read_config(origin.folder),
        "logits_fn": engine.rules.logits_fn,
        "speculation": None if is_plain else speculation,
    }
    return {
        "software": f"jaxkv {jaxkv.__version__}, jax {jax.__version__}",
        "weights": digests.digest_files(weight_files(origin.folder)),
        "drafts": digests.digest_files(draft_files),
        **{name: digests.digest_value(name, value) for name, value in deciding.items()},
        "tokenizer": tokenizer_identity(engine.tokenizer),
        "end_tokens": str(sorted(engine.eos_ids)),
        "dtype": origin.dtype,
        "weight_format": origin.weights,
        "precision": str(options),
        "numerics": numerics,
        **page_identity(config, engine.state.pages),
    }


def page_identity(config: EngineConfig, pages: Pages) -> dict[str, str]:
    """Returns the fields of an identity that describe pages.

    Args:
      config: the engine's bounds.
      pages: its page arrays, or their shapes.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(pages)
    shapes = [
        f"{jax.tree_util.keystr(path)}: {x.dtype}{[x.shape[0], *x.shape[2:]]}"
        for path, x in leaves
    ]
    both = pages, pages.draft_pages
    return {
        "page_size": str(config.page_size),
        # The width of values that are a part of the keys is in no shape.
        "value_width": ", ".join(str(x.layout.value_width) for x in both if x),
        "layout": "; ".join(shapes),
    }


def tokenizer_identity(tokenizer: Tokenizer | ByteTokenizer | None) -> str:
    """Returns a digest of a tokenizer with its chat templates; "None" without one.

    End tokens are not included: those of an engine may differ.
    """
    if tokenizer is None:
        return "None"
    settings = {k: x for k, x in tokenizer.settings.items() if k not in _ORIGINS}
    files = tokenizer.files()
    files.pop("tokenizer_config.json", None)  # the settings as text
    content = [type(tokenizer).__name__, tokenizer.vocab_size, settings, files]
    return digests.digest_value("tokenizer", content)


def describe_difference(other: object, identity: dict[str, str]) -> str | None:
    """Describes the first field in which identities differ; None if they are equal."""
    if not isinstance(other, dict):
        return f"identity={other!r} must be an object"
    for name in sorted({*identity, *other}):
        if other.get(name) != identity.get(name):
            return f"{name}={other.get(name)!r} must be {identity.get(name)!r}"
    return None
