"""Documents, their split, and the order in which training reads them."""

import hashlib
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scaling import corpora, streams


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for i in range(40):
        (tmp_path / "deep" / f"{i}.txt").write_text(f"text number {i}\n" * (i + 1))
    return tmp_path


def load(folder: Path, held_out: float = 0.25) -> corpora.Split:
    pattern = f"{folder}/**/*.txt"
    return corpora.load(corpora.CorpusConfig(pattern=pattern, held_out=held_out))


def names(documents: list[corpora.Document]) -> list[str]:
    return [document.name for document in documents]


def test_whole_documents_are_held_out_by_name(folder: Path) -> None:
    split = load(folder)
    train, held_out = set(names(split.train)), set(names(split.held_out))
    assert not train & held_out
    assert len(train | held_out) == 40
    assert 2 <= len(held_out) <= 20
    for name in train | held_out:
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
        assert (place < 0.25) == (name in held_out)


def test_split_of_a_document_does_not_depend_on_the_others(folder: Path) -> None:
    before = load(folder)
    for name in names(before.train)[::2]:
        (folder / name).unlink()
    (folder / "new.txt").write_text("new")
    after = load(folder)
    assert set(names(after.held_out)) - {"new.txt"} == set(names(before.held_out))


def test_documents_that_teach_nothing_are_left_out(folder: Path) -> None:
    (folder / "a_copy.txt").write_text((folder / "deep" / "3.txt").read_text())
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    split = load(folder)
    found = names(split.train) + names(split.held_out)
    assert "a_copy.txt" in found
    assert not {"deep/3.txt", "empty.txt", "latin.txt"} & set(found)
    assert len(found) == 40


def test_a_single_file_is_named_in_the_complaint(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^1 documents in .*3.txt are too few to hold"
    ):
        corpora.load(corpora.CorpusConfig(pattern=f"{folder}/deep/3.txt"))


def test_no_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^no text files in .*\*\.py$"):
        corpora.load(corpora.CorpusConfig(pattern=f"{tmp_path}/*.py"))


@pytest.mark.parametrize("held_out", [0.0, 1.0, -1.0])
def test_split_must_leave_two_sides(held_out: float) -> None:
    with pytest.raises(ValueError, match=r"held_out=.* must be in"):
        corpora.CorpusConfig(held_out=held_out)


def test_standard_library_is_typical_text() -> None:
    split = corpora.load(corpora.STANDARD_LIBRARY)
    every = set(names(split.train) + names(split.held_out))
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= every
    assert not [
        n for n in every if {"test", "tests", "site-packages"} & {*n.split("/")}
    ]
    assert 3e6 < corpora.num_bytes(split.train) < 3e7
    share = corpora.num_bytes(split.held_out) / corpora.num_bytes(split.train)
    assert 0.01 < share < 0.15
    root = Path(sysconfig.get_path("stdlib"))
    assert corpora.held_out_files() == [root / name for name in names(split.held_out)]


def test_tokens_are_bytes_with_an_end_after_each_document(tmp_path: Path) -> None:
    texts = ["né", "b"]
    documents = [corpora.Document(t, tmp_path / t, t.encode()) for t in texts]
    expected = [ord("n"), 0xC3, 0xA9, corpora.END, ord("b"), corpora.END]
    assert corpora.tokens(documents).tolist() == expected
    assert corpora.num_bytes(documents) == 4
    assert corpora.tokens([]).tolist() == []


@pytest.mark.parametrize("size", [1, 2, 97, 256])
def test_order_is_a_permutation(size: int) -> None:
    rounds = jax.random.bits(jax.random.key(size), (24, 2), jnp.uint32)
    place = jax.vmap(lambda i: streams._shuffled(i, rounds, size))
    order = np.asarray(place(jnp.arange(size, dtype=jnp.uint32)))
    assert sorted(order) == list(range(size))
    if size > 90:  # shuffled: neighbours are as far apart as chance would have it
        distance = np.abs(np.diff(order.astype(int))).mean()
        assert 0.25 < distance / size < 0.42


JITTED = jax.jit(corpora.draw, static_argnames=("batch_size", "seq_len"))


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


def test_a_step_depends_on_seed_and_step_alone() -> None:
    stream = jnp.arange(1000, dtype=jnp.uint16)
    found = corpora.draw(stream, jnp.int32(0), jnp.int32(3), batch_size=4, seq_len=16)
    for step in (7, 3):
        again = draw(1000, step, batch_size=4, seq_len=16)
        assert (again == found).all() == (step == 3)


def test_text_shorter_than_a_window_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="8 tokens is shorter than one window"):
        corpora.windows_per_epoch(8, 8)
    assert corpora.windows_per_epoch(9, 8) == 1
