"""Random Hugging Face folders: equal to transformers, or refused in one line.

The folders come from `golden/make_folders.py`, run by a Python that has torch and
transformers; this one needs neither:

    JAXKV_PEER_PYTHON=/path/to/python pytest -m slow -k foreign_folders -s

`JAXKV_PEER_SEED` draws other folders, and `-s` prints the results.
"""

import collections
import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models import FAMILIES, checkpoints
from scaling.corpora import open_corpus
from scaling.sweeps import TRAININGS
from scaling.training import train_in_memory
from tests.support.folders import GOLDEN

PEER = os.environ.get("JAXKV_PEER_PYTHON")
SEED = int(os.environ.get("JAXKV_PEER_SEED", "0"))
SCRIPT = GOLDEN / "make_folders.py"
NUM = 300
TOLERANCE = 1e-4
"""Tolerance relative to the largest logit, also of margins of greedy tokens."""

logits = jax.jit(models.logits, static_argnames="config")


class Verdict(NamedTuple):
    kind: str
    """equal, different, refused, or unchecked where only transformers refuses."""
    line: str


def judge(folder: Path) -> Verdict:
    try:
        config, params, *_ = checkpoints.load_model(folder)
    except ValueError as error:
        line = str(error)
        assert str(folder) in line
        assert "\n" not in line
        return Verdict("refused", line.replace(str(folder), "FOLDER"))
    if not (folder / "expected.npz").exists():
        return Verdict("unchecked", (folder / "refused.txt").read_text().strip())
    expected = np.load(folder / "expected.npz")
    our_logits = logits(params, jnp.asarray(expected["ids"]), config=config)
    gap = (
        np.abs(our_logits - expected["logits"]).max() / np.abs(expected["logits"]).max()
    )
    if not gap < TOLERANCE:
        return Verdict("different", f"logits of {config.family} by {gap:.1e}")
    tokens = expected["greedy"]
    num = len(expected["margins"])
    our_logits = logits(params, jnp.asarray(tokens[None]), config=config)[
        0, -num - 1 : -1
    ]
    differs = np.asarray(jnp.argmax(our_logits, axis=-1)) != tokens[-num:]
    if (differs & (expected["margins"] > TOLERANCE * np.abs(our_logits).max())).any():
        return Verdict("different", f"greedy tokens of {config.family}")
    return Verdict("equal", config.family)


def reason(line: str) -> str:
    """Returns a refusal without its values, for counting."""
    line = re.sub(
        r"^FOLDER[^ ]*: |'[^']*'|(?<![\w.])\d[\d.e+-]*|[{[].*[}\]]|, \.\.\.", "", line
    )
    return re.sub(r"^.*(may change the logits)", r"\1", line)[:70]


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="JAXKV_PEER_PYTHON names no Python")
def test_random_folders_agree_with_transformers(tmp_path: Path) -> None:
    subprocess.run(
        [str(PEER), str(SCRIPT), str(tmp_path), f"--seed={SEED}", f"--num={NUM}"],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    verdicts = {path.name: judge(path) for path in sorted(tmp_path.iterdir())}
    assert len(verdicts) == NUM
    print("\n", collections.Counter(verdict.kind for verdict in verdicts.values()))
    for kind in ("equal", "refused", "unchecked"):
        lines = [reason(x.line) for x in verdicts.values() if x.kind == kind]
        print(f"\n{kind}:", *collections.Counter(lines).most_common(), sep="\n  ")
    different = {k: v.line for k, v in verdicts.items() if v.kind == "different"}
    assert not different
    # Many folders are served: refusing all of them would pass otherwise.
    assert sum(verdict.kind == "equal" for verdict in verdicts.values()) > 0.3 * NUM
    families = {
        verdict.line for verdict in verdicts.values() if verdict.kind == "equal"
    }
    table = FAMILIES
    assert families == {name for name, x in table.items() if x.servable}


READ = """
import sys, numpy, torch, transformers
folder, ids = sys.argv[1], [*map(int, sys.argv[2].split(","))]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
print(transformers.AutoTokenizer.from_pretrained(folder)(sys.argv[3])["input_ids"])
print(model.generate(torch.tensor([ids]), **options)[0].tolist())
"""
"""Program of the peer: prints the ids of a text, and a greedy continuation."""


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="JAXKV_PEER_PYTHON names no Python")
def test_transformers_reads_saved_folders(tmp_path: Path) -> None:
    """Digests and shards change neither ids nor greedy tokens."""
    source = checkpoints.load_model(GOLDEN / "tokenized")
    config, params, tokenizer, _ = source
    folder = checkpoints.save_model(
        tmp_path / "m", config, params, tokenizer=tokenizer, max_shard_bytes=40_000
    )
    assert (folder / "SHA256SUMS").exists()
    assert tokenizer is not None
    text = "def f(x): return x + 1"
    ids = [int(x) for x in tokenizer.encode(text)]
    answer = subprocess.run(
        [str(PEER), "-c", READ, str(folder), ",".join(map(str, ids)), text],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    encoded, greedy = map(json.loads, answer.stdout.splitlines())
    assert encoded == ids
    expected = [*ids]
    for _ in range(8):
        last = logits(params, jnp.asarray([expected]), config=config)[0, -1]
        expected.append(int(jnp.argmax(last)))
    assert greedy == expected


COMPUTE = """
import sys, numpy, torch, transformers
folder, ids = sys.argv[1], numpy.load(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
print(model.config.model_type, sum(x.numel() for x in model.parameters()))
with torch.no_grad():
    numpy.save(sys.argv[2], model(torch.tensor(ids)).logits.numpy())
"""
"""Program of the peer: replaces token ids in a file by their logits."""


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="JAXKV_PEER_PYTHON names no Python")
@pytest.mark.parametrize("family", ["gpt_neox", "nanochat"])
def test_transformers_computes_a_trained_folder(family: str, tmp_path: Path) -> None:
    """The folder of a run of a few steps, with the bytes of its text as tokens."""
    raw = json.loads((GOLDEN / family / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw | {"vocab_size": 257}))
    model = models.read_config(path)
    run = dataclasses.replace(TRAININGS["smoke"], model=model)
    result = train_in_memory(run, open_corpus(run.corpus))
    assert result.curve[-1]["loss"] < 0.8 * result.curve[0]["loss"]
    folder = models.save_model(tmp_path / "trained", model, result.params)
    ids = np.frombuffer(b"def read(path):\n    return x", np.uint8).astype(np.int64)
    np.save(tmp_path / "ids.npy", ids[None])
    answer = subprocess.run(
        [str(PEER), "-c", COMPUTE, str(folder), str(tmp_path / "ids.npy")],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    num_params = sum(x.size for x in jax.tree.leaves(result.params))
    assert answer.stdout.split() == [family, str(num_params)]
    expected = np.load(tmp_path / "ids.npy")
    ours = logits(result.params, jnp.asarray(ids[None], jnp.int32), config=model)
    assert np.abs(ours - expected).max() < TOLERANCE * np.abs(expected).max()
