"""Writes growing answers to standard output, one after another.

Without a terminal, the output consists of the texts and headings between them.
"""

import os
import sys

from jaxkv.cli.console.terminal_text import make_printable


class AnswerWriter:
    """Writes texts that grow in parallel one after another.

    The first incomplete text is written live; later texts are buffered. On a terminal,
    each answer follows its prompt, and control characters of a model are replaced.
    """

    def __init__(self, prompts: tuple[str, ...], *, is_whole: bool = False):
        """Starts with the first text.

        Args:
          prompts: prompt of each text.
          is_whole: True if complete texts arrive with their scores, instead of growing
            texts.
        """
        self._prompts = prompts
        self._whole = is_whole
        self._waiting = [""] * len(prompts)
        self._complete = [False] * len(prompts)
        self._scores: list[float | None] = [None] * len(prompts)
        self._turn = 0
        self._begun = False
        self._on_terminal = sys.stdout.isatty()
        self._begin()

    def __call__(
        self, index: int, text: str, complete: bool, score: float | None = None
    ) -> None:
        """Adds text to an answer, with its completion and score."""
        self._waiting[index] += text
        self._complete[index] |= complete
        self._scores[index] = self._scores[index] if score is None else score
        while self._turn < len(self._prompts):
            self._begin()
            if self._begun:
                self._write(self._waiting[self._turn])
                self._waiting[self._turn] = ""
            if not self._complete[self._turn]:
                return
            self._write("\n")
            self._turn = self._turn + 1
            self._begun = False
            self._begin()

    def finish(self) -> None:
        """Writes the buffered texts."""
        for index in range(self._turn, len(self._prompts)):
            self(index, "", True)

    def _begin(self) -> None:
        """Writes the heading of the current text as soon as it is known."""
        if self._begun or self._turn == len(self._prompts):
            return
        if self._whole and not self._complete[self._turn]:
            return
        self._begun = True
        if len(self._prompts) > 1:
            score = self._scores[self._turn]
            scored = "" if score is None else f", score {score:.3f}"
            self._write(f"--- {self._turn + 1} of {len(self._prompts)}{scored} ---\n")
        if self._on_terminal:
            prompt = make_printable(self._prompts[self._turn])
            is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
            sys.stdout.write(prompt if is_plain else f"\033[1m{prompt}\033[0m")

    def _write(self, text: str) -> None:
        sys.stdout.write(make_printable(text) if self._on_terminal else text)
        sys.stdout.flush()
