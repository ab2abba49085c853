"""Grammars for constrained answers: regular expressions as tables that a step reads.

Several steps run in one device call, so no matcher on the host can mask their tokens. A
grammar is a deterministic automaton over tokens instead: the library outlines-core
makes an automaton over bytes, and every token of the vocabulary is followed through it.
Tokens that lead from every state to the same states form a class, so the table has a
column for each class and not for each token.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkv import validation
from jaxkv.sampling import json_schemas

END_CLASS = 0
"""Class of the tokens that end an answer: allowed in accepting states only."""
FORBIDDEN_CLASS = 1
"""Class of tokens without text; never allowed."""
FORBIDDEN = -1
"""Next state of a token that a state does not allow."""
MAX_TABLE_BYTES = 64 * 2**20
"""Largest size of a table, in bytes."""

_NUM_SENTINELS = 256
"""Zero bytes before an expression. outlines-core makes an automaton that may begin a
match at any byte, with a number of states that is exponential in the bounds of
repetitions. After the zero bytes a match begins at their end only. One zero byte after
the expression keeps the continuations of a match: the library drops those that begin
with an incomplete one, so that it reads "a(bc)?" as "a"."""


@runtime_checkable
class TextVocabulary(Protocol):
    """A tokenizer that knows the bytes of its tokens, as those of `jaxkv.text`."""

    def __hash__(self) -> int:
        """Returns the hash by which a built grammar is found again."""
        ...

    def token_bytes(self) -> Sequence[bytes | None]:
        """Returns the bytes of each token; None for tokens without text."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A regular language of answers, as an automaton over the tokens of a vocabulary.

    Equal grammars have equal digests. State 0 is the initial state.
    """

    name: str
    """Name in messages: the expression, or the origin of the schema."""
    classes: Int32[np.ndarray, " vocab"]
    """Class of each token: a column of the table."""
    table: Int32[np.ndarray, "states classes"]
    """Next state of each state and class; `FORBIDDEN` where a token is not allowed. An
    end token leaves an accepting state as it is."""

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: TextVocabulary) -> "Grammar":
        """Makes the grammar of a regular expression, which the whole answer matches.

        Args:
          pattern: expression in the syntax of Rust's `regex`: Perl's without
            look-around and back-references; `^` and `$` are implied. Texts have no zero
            bytes.
          tokenizer: tokenizer of the model.

        Returns:
          The grammar; repeated calls return the same one.

        Raises:
          ValueError: outlines-core is not installed, the expression is not valid, the
            tokens cannot write a match, or the table is above `MAX_TABLE_BYTES`.
        """
        validation.instance("pattern", pattern, str)
        return _build(pattern, tokenizer, pattern)

    @classmethod
    def from_json_schema(
        cls, schema: "json_schemas.JsonSchema", tokenizer: TextVocabulary
    ) -> "Grammar":
        """Makes the grammar of the JSON documents that a schema accepts.

        The answers are a part of the valid documents: properties are in the order of
        the schema, and there are no further ones.

        Args:
          schema: JSON schema; unsupported keywords are refused, see
            `json_schemas.schema_pattern`.
          tokenizer: tokenizer of the model.

        Raises:
          ValueError: as `from_regex`, or the schema is not supported.
        """
        return _build(json_schemas.schema_pattern(schema), tokenizer, "JSON schema")

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the automaton."""
        content = hashlib.sha256(repr(self.table.shape).encode())
        for array in (self.classes, self.table):
            content.update(array.tobytes())
        return content.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        return self.classes.nbytes + self.table.nbytes

    def __eq__(self, other: object) -> bool:
        """True if both accept the same token sequences by the same automaton."""
        return isinstance(other, Grammar) and self.digest == other.digest

    def __hash__(self) -> int:
        """Hash of the digest."""
        return hash(self.digest)

    def __repr__(self) -> str:
        """One line with the sizes."""
        states, classes = self.table.shape
        name = validation.format_value(self.name)
        return f"Grammar({name}, {states} states, {classes} classes)"


class GrammarTables(NamedTuple):
    """The grammars of an engine, as a step reads them.

    A state of a grammar is the index of its row in the flattened `cells`, so that the
    next state of a token is `cells[state + class]`.
    """

    classes: Int32[Array, "grammars vocab"]
    """Class of each token in each grammar."""
    cells: Int32[Array, "grammars max_cells"]
    """Tables of the grammars, row by row; `FORBIDDEN` in unused cells."""


@validation.checks_numbers(max_grammars=1, vocab_size=1, max_cells=1)
def make_grammar_tables(
    max_grammars: int, vocab_size: int, max_cells: int
) -> GrammarTables:
    """Returns tables without grammars."""
    return GrammarTables(
        jnp.zeros((max_grammars, vocab_size), jnp.int32),
        jnp.full((max_grammars, max_cells), FORBIDDEN, jnp.int32),
    )


@validation.checks_numbers(index=0)
def load_grammar(
    tables: GrammarTables, index: int, grammar: Grammar, end_tokens: Sequence[int]
) -> GrammarTables:
    """Writes a grammar to the tables, in place of the one at `index`."""
    classes = np.full(tables.classes.shape[1], FORBIDDEN_CLASS, np.int32)
    classes[: grammar.classes.size] = grammar.classes
    classes[list(end_tokens)] = END_CLASS
    max_cells = tables.cells.shape[1]
    rows = grammar.table * grammar.table.shape[1] + index * max_cells
    rows = np.where(grammar.table == FORBIDDEN, FORBIDDEN, rows).reshape(-1)
    padded = np.pad(rows, (0, max_cells - rows.size), constant_values=FORBIDDEN)
    return GrammarTables(
        tables.classes.at[index].set(classes), tables.cells.at[index].set(padded)
    )


def next_grammar_state(
    tables: GrammarTables, state: Int32[Array, "*rows"], token: Int32[Array, "*rows"]
) -> Int32[Array, "*rows"]:
    """Returns the state after a token; `FORBIDDEN` if it is not allowed.

    Args:
      tables: grammars.
      state: states; negative ones, of rows without a grammar, do not change.
      token: token ids in [0, vocab).
    """
    row = jnp.maximum(state, 0)
    kind = tables.classes[row // tables.cells.shape[1], token]
    return jnp.where(state < 0, state, tables.cells.reshape(-1)[row + kind])


def mask_forbidden(
    tables: GrammarTables,
    state: Int32[Array, " rows"],
    logits: Float[Array, "rows vocab"],
) -> Float[Array, "rows vocab"]:
    """Sets the logits of forbidden tokens to -inf; rows without a grammar are equal.

    Args:
      tables: grammars.
      state: state of each row; negative without a grammar.
      logits: next-token logits.
    """

    def mask() -> Array:
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        tokens = jnp.broadcast_to(ids, logits.shape)
        rows = jnp.broadcast_to(state[:, None], logits.shape)
        allowed = next_grammar_state(tables, rows, tokens) >= 0
        return jnp.where(allowed | (state < 0)[:, None], logits, -jnp.inf)

    with jax.named_scope("grammar"):
        return lax.cond(jnp.any(state >= 0), mask, lambda: logits)


@functools.lru_cache(maxsize=64)
def _build(pattern: str, tokenizer: TextVocabulary, name: str) -> Grammar:
    """Makes a grammar of the automaton over bytes."""
    validation.instance("tokenizer", tokenizer, TextVocabulary)
    edges, accepting = _byte_automaton(pattern, name)
    edges, accepting = _merge_equal_states(edges, accepting)
    columns, byte_class = np.unique(edges, axis=1, return_inverse=True)
    translation = bytes(byte_class.reshape(-1).astype(np.uint8))
    token_bytes = tokenizer.token_bytes()
    texts = [x.translate(translation) if x else None for x in token_bytes]
    num_states = edges.shape[0] - 1
    sink = num_states
    ending = np.where(accepting[:sink], np.arange(sink), sink)
    first = [ending, np.full(num_states, sink)]
    classes_of = {x.astype(np.int32).tobytes(): i for i, x in enumerate(first)}
    text_class: dict[bytes | None, int] = {None: FORBIDDEN_CLASS}
    # Sorted, so that a text shares the states of the longest prefix with the last one.
    path: list[np.ndarray] = [np.arange(num_states, dtype=np.int32)]
    last = b""
    for text in sorted({x for x in texts if x is not None}):
        shared = 0
        while shared < min(len(text), len(last)) and text[shared] == last[shared]:
            shared += 1
        del path[shared + 1 :]
        for byte in text[shared:]:
            path.append(columns[path[-1], byte])
        last = text
        # The end class is for end tokens only, also where a text has an equal column.
        key = b"text" + path[-1].tobytes() if (path[-1] < sink).any() else None
        if key is None:
            text_class[text] = FORBIDDEN_CLASS
            continue
        text_class[text] = classes_of.setdefault(key, len(classes_of))
        num_bytes = len(classes_of) * num_states * 4
        if num_bytes > MAX_TABLE_BYTES:
            raise ValueError(
                f"grammar={validation.format_value(name)} needs a table above "
                f"MAX_TABLE_BYTES={MAX_TABLE_BYTES}: {num_states} states of more than "
                f"{len(classes_of)} token classes"
            )
    keys = [key.removeprefix(b"text") for key in classes_of]
    table = np.stack([np.frombuffer(key, np.int32) for key in keys], axis=1)
    table = _drop_dead_states(np.where(table == sink, FORBIDDEN, table))
    if not table.size:
        raise ValueError(
            f"grammar={validation.format_value(name)} accepts no text of this "
            "vocabulary"
        )
    classes = np.array([text_class[text] for text in texts], np.int32)
    return Grammar(name, classes, table)


def _byte_automaton(pattern: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns next states by state and byte, and a mask of accepting states.

    State 0 is the initial state; the last one is a sink.

    Raises:
      ValueError: outlines-core is not installed, or the expression is not valid.
    """
    validation.check_installed("a grammar", "grammar", "outlines_core")
    import outlines_core

    alphabet = {bytes([byte]): [byte] for byte in range(256)}
    vocabulary = outlines_core.Vocabulary(256, alphabet)  # 256 ends a text
    framed = f"\\x00{{{_NUM_SENTINELS}}}(?:{pattern})\\x00"
    try:
        index = outlines_core.Index(framed, vocabulary)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"grammar={validation.format_value(name)}: {validation.one_line(error)}"
        ) from None
    transitions = index.get_transitions()
    start = index.get_initial_state()
    if transitions[start].keys() != {0}:
        raise ValueError(f"grammar={validation.format_value(name)}: unopened group")
    for _ in range(_NUM_SENTINELS):
        start = transitions[start][0]
    # The end of a match is the zero byte after it; texts have no zero bytes.
    order = {start: 0}
    pending = [start]
    while pending:
        for byte, target in transitions[pending.pop()].items():
            if 0 < byte < 256 and target not in order:
                order[target] = len(order)
                pending.append(target)
    sink = len(order)
    edges = np.full((sink + 1, 256), sink, np.int32)
    accepting = np.zeros(sink + 1, bool)
    final = set(index.get_final_states())
    for state, row in order.items():
        accepting[row] = transitions[state].get(0) in final
        for byte, target in transitions[state].items():
            if 0 < byte < 256:
                edges[row, byte] = order[target]
    return edges, accepting


def _merge_equal_states(
    edges: np.ndarray, accepting: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the minimal automaton, by refinement of a partition of the states.

    Source: Moore 1956, "Gedanken-experiments on sequential machines".
    """
    columns = np.unique(edges, axis=1)
    block = accepting.astype(np.int32)
    num_blocks = 0
    while True:
        keys = np.concatenate([block[:, None], block[columns]], axis=1)
        _, first, block = np.unique(
            keys, axis=0, return_index=True, return_inverse=True
        )
        block = block.reshape(-1)
        if len(first) == num_blocks:
            break
        num_blocks = len(first)
    # The initial state is 0 again, and the sink is last, also with states equal to it.
    first[block[-1]] = len(edges) - 1
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    block = rank[block].astype(np.int32)
    first = first[order]
    return block[edges[first]], accepting[first]


def _drop_dead_states(
    table: Int32[np.ndarray, "states classes"],
) -> Int32[np.ndarray, "live classes"]:
    """Drops the states from which no answer can end.

    The table is empty if there is no answer.
    """
    is_edge = table != FORBIDDEN
    live = is_edge[:, END_CLASS]
    while True:
        grown = live | np.any(is_edge & live[table], axis=1)
        if np.array_equal(grown, live):
            break
        live = grown
    table = np.where(is_edge & live[table], table, FORBIDDEN)
    rows = np.flatnonzero(live)
    new_index = np.full(len(table) + 1, FORBIDDEN, np.int32)  # the last is FORBIDDEN's
    new_index[rows] = np.arange(rows.size)
    return new_index[table[rows]] if live[:1].any() else table[:0]
