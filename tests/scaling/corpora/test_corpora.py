"""Documents, their split and tokens, the order of training, and scores."""

import dataclasses
import hashlib
import math
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import init_params
from scaling.corpora import corpora, streams
from scaling.training import objectives
from tests.support import mutation
from tests.support.mutation import Bug
from tests.support.shapes import SMALL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for i in range(40):
        (tmp_path / "deep" / f"{i}.txt").write_text(f"text number {i}\n" * (i + 1))
    return tmp_path


def load(folder: Path, held_out: float = 0.25) -> corpora.TextSplit:
    pattern = f"{folder}/**/*.txt"
    return corpora.load_documents(
        corpora.CorpusConfig(pattern=pattern, held_out=held_out)
    )


def names(documents: list[corpora.Document]) -> list[str]:
    return [document.name for document in documents]


def test_whole_documents_are_held_out_by_name(folder: Path) -> None:
    split = load(folder)
    train = set(names(split.train))
    held_out = set(names(split.held_out))
    assert not train & held_out
    assert len(train | held_out) == 40
    assert 2 <= len(held_out) <= 20
    for name in train | held_out:
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
        assert (place < 0.25) == (name in held_out)


def test_uninformative_documents_are_left_out(folder: Path) -> None:
    (folder / "a_copy.txt").write_text((folder / "deep" / "3.txt").read_text())
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    split = load(folder)
    split_names = names(split.train) + names(split.held_out)
    assert "a_copy.txt" in split_names
    assert not {"deep/3.txt", "empty.txt", "latin.txt"} & set(split_names)
    assert len(split_names) == 40


def test_a_single_file_is_named_in_the_complaint(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^1 documents in .*3.txt are too few to hold"
    ):
        corpora.load_documents(corpora.CorpusConfig(pattern=f"{folder}/deep/3.txt"))


def test_no_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^no text files in .*\*\.py$"):
        corpora.load_documents(corpora.CorpusConfig(pattern=f"{tmp_path}/*.py"))
    for i in range(3):
        (tmp_path / f"{i}.bin").write_bytes(bytes([255, i]))
    with pytest.raises(ValueError, match=r"\*\.bin: 3 files, all empty or not UTF-8$"):
        corpora.load_documents(corpora.CorpusConfig(pattern=f"{tmp_path}/*.bin"))


def test_standard_library_is_typical_text() -> None:
    split = corpora.load_documents(corpora.STANDARD_LIBRARY)
    every = set(names(split.train) + names(split.held_out))
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= every
    assert not [
        n for n in every if {"test", "tests", "site-packages"} & {*n.split("/")}
    ]
    assert 3e6 < corpora.count_bytes(split.train) < 3e7
    share = corpora.count_bytes(split.held_out) / corpora.count_bytes(split.train)
    assert 0.01 < share < 0.15
    root = Path(sysconfig.get_path("stdlib"))
    assert corpora.held_out_files() == [root / name for name in names(split.held_out)]


def test_tokens_are_bytes_with_an_end_after_each_document(tmp_path: Path) -> None:
    texts = ["né", "b"]
    documents = [corpora.Document(t, tmp_path / t, t.encode()) for t in texts]
    expected = [ord("n"), 0xC3, 0xA9, corpora.END_TOKEN, ord("b"), corpora.END_TOKEN]
    assert corpora.encode_documents(documents).tolist() == expected
    assert corpora.count_bytes(documents) == 4
    assert corpora.encode_documents([]).tolist() == []


@pytest.mark.parametrize("size", [1, 2, 97, 256])
def test_order_is_a_permutation(size: int) -> None:
    rounds = jax.random.bits(jax.random.key(size), (24, 2), jnp.uint32)
    place = jax.vmap(lambda i: streams._shuffled(i, rounds, size))
    order = np.asarray(place(jnp.arange(size, dtype=jnp.uint32)))
    assert sorted(order) == list(range(size))
    if size > 90:  # shuffled: neighbours are as far apart as at random
        distance = np.abs(np.diff(order.astype(int))).mean()
        assert 0.25 < distance / size < 0.42


JITTED = jax.jit(corpora.draw_windows, static_argnames=("batch_size", "seq_len"))


def draw(num_tokens: int, step: int, seed: int = 0, **sizes: int) -> np.ndarray:
    stream = jnp.arange(num_tokens, dtype=jnp.uint16)
    return np.asarray(JITTED(stream, jnp.int32(seed), jnp.int32(step), **sizes))


def test_each_epoch_reads_every_window_once_in_a_new_order() -> None:
    sizes = {"batch_size": 5, "seq_len": 8}
    num_tokens = 15 * 8 + 3
    assert corpora.windows_per_epoch(num_tokens, 8) == 15
    epochs = []
    for epoch in range(2):
        windows = np.concatenate(
            [draw(num_tokens, 3 * epoch + i, **sizes) for i in range(3)]
        )
        assert windows.shape == (15, 9)
        # Consecutive tokens of the ring, and no prediction twice.
        assert ((windows[:, 1:] - windows[:, :-1]) % num_tokens == 1).all()
        assert len(set(windows[:, 1:].ravel().tolist())) == 15 * 8
        epochs.append(windows[:, 0].tolist())
    assert epochs[0] != epochs[1]
    assert draw(num_tokens, 0, seed=1, **sizes)[:, 0].tolist() != epochs[0][:5]


@pytest.mark.thorough
def test_a_step_depends_only_on_seed_and_step() -> None:
    stream = jnp.arange(1000, dtype=jnp.uint16)
    windows = corpora.draw_windows(
        stream, jnp.int32(0), jnp.int32(3), batch_size=4, seq_len=16
    )
    for step in (7, 3):
        again = draw(1000, step, batch_size=4, seq_len=16)
        assert (again == windows).all() == (step == 3)


def test_text_shorter_than_a_window_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="8 tokens is shorter than one window"):
        corpora.windows_per_epoch(8, 8)
    assert corpora.windows_per_epoch(9, 8) == 1


def byte_pairs(folder: Path, **fields) -> corpora.CorpusConfig:
    return corpora.CorpusConfig(
        pattern=f"{folder}/**/*.txt",
        held_out=0.25,
        tokenizer="bpe",
        vocab_size=270,
        **fields,
    )


def test_byte_pairs_give_the_text_back(folder: Path, tmp_path: Path) -> None:
    # Text with the end-of-document string, and bytes that occur nowhere else.
    odd = "naïve <|endoftext|> \x00 文\n"
    (folder / "odd.txt").write_text(odd)
    config = byte_pairs(folder)
    cache = tmp_path / "cache"
    corpus = corpora.open_corpus(config, cache=cache)
    split = corpora.load_documents(config)
    tokenizer = corpora.corpus_tokenizer(config, cache=cache)
    for stream, documents in zip((corpus.stream, corpus.held_out), split, strict=True):
        after = np.flatnonzero(stream == byte_pairs_end(tokenizer)) + 1
        parts = np.split(stream, after)
        assert [
            tokenizer.decode(part[:-1].tolist()).encode() for part in parts[:-1]
        ] == [document.text for document in documents]
        assert stream.max() < corpus.vocab_size == 270
    # Frequent pairs are one token: fewer tokens than bytes, with the same byte count.
    num_bytes = corpora.count_bytes(split.held_out)
    assert corpus.bytes_per_token == num_bytes / len(corpus.held_out) > 1.5


def byte_pairs_end(tokenizer) -> int:
    (end,) = tokenizer.eos_ids
    return end


def test_byte_pairs_are_kept_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    config = byte_pairs(folder)
    cache = tmp_path / "cache"
    first = corpora.open_corpus(config, cache=cache)
    (cache_folder,) = cache.iterdir()
    assert isinstance(corpora.open_corpus(config, cache=cache).stream, np.memmap)
    # Learnt again, or without a writable cache, they are the same.
    (cache_folder / "train.npy").unlink()
    assert corpora.open_corpus(config, cache=cache).digest == first.digest
    (tmp_path / "file").touch()
    assert corpora.open_corpus(config, cache=tmp_path / "file").digest == first.digest
    # Another text has another file.
    (folder / "new.txt").write_text("something new")
    assert corpora.open_corpus(config, cache=cache).digest != first.digest
    assert len([*cache.iterdir()]) == 2


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_fewer_unique_tokens_are_part_of_more(
    folder: Path, tmp_path: Path, tokenizer: str
) -> None:
    config = byte_pairs(folder)
    if tokenizer == "bytes":
        config = dataclasses.replace(config, tokenizer="bytes", vocab_size=257)
    full_corpus = corpora.open_corpus(config, cache=tmp_path)

    def take_tokens(num: int) -> np.ndarray:
        fewer = dataclasses.replace(config, num_unique_tokens=num)
        corpus = corpora.open_corpus(fewer, cache=tmp_path)
        assert corpus.held_out.tolist() == full_corpus.held_out.tolist()
        assert corpus.epochs(3 * num) == 3
        return corpus.stream

    everything = take_tokens(len(full_corpus.stream))
    assert take_tokens(1000).tolist() == everything[:1000].tolist()
    # The same documents in another order, not in order of their names.
    assert sorted(everything) == sorted(full_corpus.stream)
    assert everything.tolist() != full_corpus.stream.tolist()
    with pytest.raises(ValueError, match="are more than its"):
        take_tokens(len(full_corpus.stream) + 1)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no such file here")
def test_files_that_cannot_be_read_are_named() -> None:
    config = corpora.CorpusConfig(pattern="/proc/self/mem")
    with pytest.raises(ValueError, match=r"^/proc/self/mem: cannot be read: Input/out"):
        corpora.open_corpus(config)


def test_documentation_is_text_of_its_folders() -> None:
    split = corpora.load_documents(corpora.DOCUMENTATION)
    every = names(split.train) + names(split.held_out)
    assert len(every) > 10
    assert {Path(name).suffix for name in every} <= {".txt", ".md", ".rst"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, "vocab_size=300 of bytes must be 257"),
        ({"tokenizer": "bpe"}, r"vocab_size=257 of byte pairs must be in \(257"),
        ({"num_unique_tokens": -1}, "num_unique_tokens=-1 must be at least 0"),
        # Both sides of the split must have text.
        ({"held_out": 0.0}, r"held_out=.* must be in"),
        ({"held_out": 1.0}, r"held_out=.* must be in"),
        ({"held_out": -1.0}, r"held_out=.* must be in"),
    ],
)
def test_impossible_corpora_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corpora.CorpusConfig(**change)


def test_streams_are_scored_in_the_same_windows() -> None:
    stream = np.arange(100, dtype=np.uint16)
    cut = objectives.stream_windows
    every = cut(stream, seq_len=9, num_windows=99)
    assert every[:, 1:].ravel().tolist() == [*range(1, 100)]
    assert (every[:, 0] == every[:, 1] - 1).all()
    windows = cut(stream, seq_len=9, num_windows=4)
    assert windows[:, 0].tolist() == [0, 18, 45, 72]
    with pytest.raises(ValueError, match="5 held-out tokens are fewer than one window"):
        cut(stream[:5], seq_len=9, num_windows=4)


def test_score_of_a_stream() -> None:
    model = dataclasses.replace(SMALL, vocab_size=7)
    held_out = np.random.default_rng(0).integers(0, 7, 500).astype(np.uint16)
    params = init_params(model, jax.random.key(0))

    def score(params, **sizes) -> objectives.StreamScore:
        sizes = {"seq_len": 8, "num_windows": 20} | sizes
        return objectives.score_stream(params, held_out, model=model, **sizes)

    # An untrained uniform model has the same loss everywhere.
    nothing = score(jax.tree.map(jnp.zeros_like, params))
    assert nothing.num_tokens == 160
    assert nothing.loss == pytest.approx(math.log(7), rel=1e-6)
    assert nothing.loss_se < 1e-6
    # With another model, the first predictions can be excluded, and the batch size has
    # no effect.
    stream_score = score(jax.tree.map(lambda p: 30 * p, params))
    late = score(jax.tree.map(lambda p: 30 * p, params), carry=3, batch_size=7)
    assert stream_score.loss_se == pytest.approx(
        stream_score.windows.std(ddof=1) / math.sqrt(20)
    )
    assert stream_score.loss == pytest.approx(stream_score.positions.mean())
    np.testing.assert_allclose(late.positions, stream_score.positions[3:], rtol=1e-5)
    assert late.num_tokens == 100
    with pytest.raises(ValueError, match=r"carry=8 must be in \[0"):
        score(params, carry=8)
    held_out[4] = 9
    with pytest.raises(ValueError, match=r"token 9 is not below model.vocab_size=7"):
        score(params)


SCORE = objectives.StreamScore


@pytest.mark.parametrize(
    ("owner", "name", "removed", "added"),
    [
        (SCORE, "of", "means.std(ddof=1) / math.sqrt(num)", "means.std(ddof=1)"),
        (SCORE, "of", "losses.size, means", "len(means), means"),
        (objectives, "score_stream", "[:, carry:]", ""),
        (objectives, "_losses", "[: len(batch)]", ""),
    ],
)
def test_a_seeded_bug_of_a_streams_score_is_detected(
    owner: Any, name: str, removed: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Bug(owner, name, removed, added, test_score_of_a_stream)
    mutation.assert_noticed(monkeypatch, bug)


def test_aligned_windows_begin_at_records() -> None:
    stream = jnp.arange(12 * 8, dtype=jnp.uint16)
    windows = corpora.draw_windows(
        stream, jnp.int32(0), jnp.int32(0), batch_size=12, seq_len=8, aligned=True
    )
    assert sorted(windows[:, 0].tolist()) == list(range(0, 12 * 8, 8))
