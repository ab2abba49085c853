"""Tasks whose reward a program checks: copying, brackets, sums, a regular language.

All share one alphabet of characters and an end token, so one model can be pretrained on
all of them. A prompt ends in "=" or ">"; an answer ends with the end token. A reward is
a jitted function of tokens: 1 for an answer that is right and ended, else 0.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jaxkv import validation

ALPHABET = "0123456789+=>()[]{}abcdefgh"
END = len(ALPHABET)
"""Token that ends an answer."""
NUM_CHARACTERS = len(ALPHABET) + 1
"""Token ids, the end token included."""
PROMPT_TOKENS = 8
"""Width of the array of prompts."""
ANSWER_TOKENS = 8
"""Largest number of tokens of an answer, the end token included."""

_OPEN, _CLOSE = "([{", ")]}"
_COPIED = "abcdefgh"


class Prompts(NamedTuple):
    """Prompts of a task."""

    tokens: Int32[Array, "prompts prompt_tokens"]
    """Token ids, arbitrary from `length` on."""
    length: Int32[Array, " prompts"]
    """Lengths in tokens."""


class Answers(NamedTuple):
    """Answers, padded with the end token."""

    tokens: Int32[Array, "answers answer_tokens"]
    """Token ids; `END` from the end of the answer on."""
    length: Int32[Array, " answers"]
    """Lengths in tokens, the end token included if it was drawn."""


class Task(NamedTuple):
    """A task: how prompts are drawn, and which answers are right.

    Attributes:
      draw: `draw(key, num)` draws prompts.
      solve: `solve(prompts)` returns one right answer to each.
      reward: `reward(prompts, answers)` is 1 for a right answer, and less for others;
        row i of both belong together.
    """

    draw: Callable[[Array, int], Prompts]
    solve: Callable[[Prompts], Answers]
    reward: Callable[[Prompts, Answers], Float[Array, " answers"]]


def decode(tokens: Int[np.ndarray, " tokens"]) -> str:
    """Returns the characters of token ids up to the end token."""
    text = ""
    for token in np.asarray(tokens).tolist():
        if token >= END:
            break
        text += ALPHABET[token]
    return text


def encode(text: str) -> list[int]:
    """Returns token ids of a text.

    Raises:
      ValueError: a character is not in the alphabet.
    """
    for character in text:
        validation.choice("character", character, tuple(ALPHABET))
    return [ALPHABET.index(character) for character in text]


def _same(prompts: Prompts, answers: Answers, solve: Callable) -> Array:
    """Returns 1 for the answers that equal the only right one."""
    right = solve(prompts)
    same = jnp.all(answers.tokens == right.tokens, axis=1)
    return (same & (answers.length == right.length)).astype(jnp.float32)


def _answer(tokens: Array, length: Array) -> Answers:
    """Pads answers of `length` tokens with the end token, which is added."""
    wide = jnp.full((tokens.shape[0], ANSWER_TOKENS), END, jnp.int32)
    wide = wide.at[:, : tokens.shape[1]].set(tokens)
    place = jnp.arange(ANSWER_TOKENS, dtype=jnp.int32)[None, :]
    return Answers(jnp.where(place < length[:, None], wide, END), length + 1)


def _prompt(tokens: Array, length: Array, last: str) -> Prompts:
    """Ends prompts of `length` tokens with a character."""
    wide = jnp.full((tokens.shape[0], PROMPT_TOKENS), END, jnp.int32)
    wide = wide.at[:, : tokens.shape[1]].set(tokens)
    place = jnp.arange(PROMPT_TOKENS, dtype=jnp.int32)[None, :]
    wide = jnp.where(place == length[:, None], ALPHABET.index(last), wide)
    return Prompts(wide, length + 1)


def _draw_letters(key: Array, num: int, letters: str, low: int, high: int) -> Prompts:
    """Draws strings of `low` to `high` of the letters, ended by ">"."""
    first, second = jax.random.split(key)
    length = jax.random.randint(first, (num,), low, high + 1, jnp.int32)
    index = jax.random.randint(second, (num, high), 0, len(letters), jnp.int32)
    codes = jnp.array([ALPHABET.index(letter) for letter in letters], jnp.int32)
    return _prompt(codes[index], length, ">")


def _copy(prompts: Prompts) -> Answers:
    return _answer(prompts.tokens[:, :-1], prompts.length - 1)


def _close_brackets(prompts: Prompts) -> Answers:
    """Closes the brackets of a prompt, the last one first."""
    num = prompts.length - 1
    place = jnp.arange(PROMPT_TOKENS - 1, dtype=jnp.int32)[None, :]
    source = jnp.maximum(num[:, None] - 1 - place, 0)
    opened = jnp.take_along_axis(prompts.tokens, source, axis=1)
    closing = jnp.arange(NUM_CHARACTERS, dtype=jnp.int32)
    for one, other in zip(_OPEN, _CLOSE, strict=True):
        closing = closing.at[ALPHABET.index(one)].set(ALPHABET.index(other))
    return _answer(closing[opened], num)


def _draw_sums(key: Array, num: int) -> Prompts:
    """Draws sums of two numbers of two digits, as "37+45="."""
    digits = jax.random.randint(key, (num, 4), 0, 10, jnp.int32)
    plus = jnp.full((num, 1), ALPHABET.index("+"), jnp.int32)
    tokens = jnp.concatenate([digits[:, :2], plus, digits[:, 2:]], axis=1)
    return _prompt(tokens, jnp.full((num,), 5, jnp.int32), "=")


def _add(prompts: Prompts) -> Answers:
    """Adds the numbers of "37+45="; the sum has three digits."""
    d = prompts.tokens
    total = 10 * (d[:, 0] + d[:, 3]) + d[:, 1] + d[:, 4]
    digits = jnp.stack([total // 100, total // 10 % 10, total % 10], axis=1)
    return _answer(digits, jnp.full(total.shape, 3, jnp.int32))


def _counts(prompts: Prompts, answers: Answers) -> tuple[Array, Array]:
    """Counts the letters a and b in each prompt and its answer."""
    place = jnp.arange(PROMPT_TOKENS, dtype=jnp.int32)[None, :]
    prompt_tokens = jnp.where(place < prompts.length[:, None], prompts.tokens, END)
    both = jnp.concatenate([prompt_tokens, answers.tokens], axis=1)
    a, b = (
        jnp.sum(both == ALPHABET.index(letter), axis=1, dtype=jnp.int32)
        for letter in "ab"
    )
    return a, b


def _is_in_language(prompts: Prompts, answers: Answers) -> Array:
    """Returns 1 for answers that make a even and b a multiple of three."""
    place = jnp.arange(ANSWER_TOKENS, dtype=jnp.int32)[None, :]
    inside = place < answers.length[:, None] - 1
    letter = answers.tokens
    is_letter = (letter == ALPHABET.index("a")) | (letter == ALPHABET.index("b"))
    last_token = jnp.take_along_axis(letter, answers.length[:, None] - 1, axis=1)[:, 0]
    a, b = _counts(prompts, answers)
    is_right = jnp.all(is_letter | ~inside, axis=1) & (last_token == END)
    is_right &= (answers.length > 0) & (a % 2 == 0) & (b % 3 == 0)
    return is_right.astype(jnp.float32)


def _complete(prompts: Prompts) -> Answers:
    """Returns the shortest completion of a prompt: an a if needed, then b."""
    empty = Answers(
        jnp.full((prompts.tokens.shape[0], ANSWER_TOKENS), END, jnp.int32),
        jnp.ones(prompts.length.shape, jnp.int32),
    )
    a, b = _counts(prompts, empty)
    first = a % 2
    num = first + -b % 3
    place = jnp.arange(ANSWER_TOKENS - 1, dtype=jnp.int32)[None, :]
    a, b = (jnp.int32(ALPHABET.index(letter)) for letter in "ab")
    return _answer(jnp.where(place < first[:, None], a, b), num)


TASKS = {
    "copying": Task(
        functools.partial(_draw_letters, letters=_COPIED, low=3, high=6),
        _copy,
        functools.partial(_same, solve=_copy),
    ),
    "brackets": Task(
        functools.partial(_draw_letters, letters=_OPEN, low=3, high=6),
        _close_brackets,
        functools.partial(_same, solve=_close_brackets),
    ),
    "sums": Task(_draw_sums, _add, functools.partial(_same, solve=_add)),
    "language": Task(
        functools.partial(_draw_letters, letters="ab", low=3, high=6),
        _complete,
        _is_in_language,
    ),
}
"""Tasks by name. "copying" repeats letters, "brackets" closes brackets in reverse
order, "sums" adds two numbers of two digits, and "language" completes a string to an
even number of a and a multiple of three of b, in any way."""


def find_task(name: str) -> Task:
    """Returns a task by name.

    Raises:
      ValueError: there is no such task.
    """
    return TASKS[validation.choice("task", name, tuple(TASKS))]
