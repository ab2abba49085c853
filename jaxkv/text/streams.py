"""Incremental decoding: token ids in, one at a time; text out, as soon as it is final.

The pieces of text that a `TextStream` returns, joined, equal the whole decode. `push`
returns the text that no later token can change. The rest is held back:

* the bytes of a character that is not complete;
* a run of byte-fallback tokens such as `<0xE6>` while it is valid UTF-8, since one
  invalid byte turns every byte of the run into a replacement character;
* the last token of a `BPEDecoder`, which ends in a space only if a token follows;
* after `Fuse`, the last characters that `Strip` removes at the end of a text, and
  characters that may begin a pattern of `Replace`;
* everything, where a decoder can still change the whole text: a regular expression
  after `Fuse`, CTC, and decoders that are not known here.

A decoder is a chain of stages. Each takes the pieces of the stage before it and has a
state of bounded size, apart from the text that is held back, so that n tokens take time
in proportion to n.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[list[str]], str]
"""Decodes the pieces of a text by one decoder of the `tokenizers` library."""

CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""Patterns and their replacements where a tokenizer is to clean up spaces."""
WORD_PIECE = (*CLEANUP[:7], (" do not", " don't"), *CLEANUP[7:])
"""Those of the WordPiece decoder."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_NUM_CONTEXT = 4
"""Tokens after which the state of every stage is that of the whole text: the bytes of
an incomplete character are at most three."""


class _Stage:
    """One decoder, applied piece by piece."""

    def push(self, piece: Any) -> Sequence[Any]:
        """Takes a piece and returns the pieces that are final."""
        raise NotImplementedError

    def held(self, is_over: bool) -> Sequence[Any]:
        """Returns the pieces that `push` holds back.

        Args:
          is_over: True if the text ends here; False leaves out what more tokens may
            complete or remove.
        """
        del is_over
        return ()

    def copy(self) -> Any:
        """Returns a stage in the same state."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other


class _Each(_Stage):
    """Applies a function to every piece by itself; has no state."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __call__(self) -> "_Each":
        return self

    def push(self, piece: Any) -> Sequence[Any]:
        return (self.function(piece),)


class _FirstApart(_Stage):
    """A decoder to which the first token of a text is special, such as Metaspace."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._is_first = True

    def push(self, piece: str) -> Sequence[str]:
        if self._is_first:
            self._is_first = False
            return (self._decode([piece]),)
        return (self._decode(["", piece]),)


class _LastApart(_Stage):
    """A decoder to which the last token of a text is special: BPEDecoder."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._last: str | None = None

    def push(self, piece: str) -> Sequence[str]:
        before, self._last = self._last, piece
        return () if before is None else (self._decode([before, ""]),)

    def held(self, is_over: bool) -> Sequence[str]:
        return () if self._last is None else (self._decode([self._last]),)


class _ByteRuns(_Stage):
    """ByteFallback: runs of byte tokens become text, or replacement characters."""

    def __init__(self):
        self._length = 0  # bytes of the run
        self._is_valid = True
        self._text: list[str] = []  # its complete characters, while it is valid
        self._partial = b""

    def copy(self) -> Any:
        other = super().copy()
        other._text = list(self._text)
        return other

    def push(self, piece: str) -> Sequence[str]:
        found = _BYTE.fullmatch(piece)
        if found is None:
            if not self._length:
                return (piece,)
            before = self.held(True)
            self.__init__()
            return (*before, piece)
        self._length += 1
        if not self._is_valid:
            return (REPLACEMENT,)
        data = self._partial + bytes([int(found[1], 16)])
        try:
            text, num = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._is_valid, self._text = False, []
            return (REPLACEMENT,) * self._length
        if text:
            self._text.append(text)
        self._partial = data[num:]
        return ()

    def held(self, is_over: bool) -> Sequence[str]:
        if not self._length or not self._is_valid:
            return ()
        if self._partial and is_over:
            return (REPLACEMENT,) * self._length
        return ("".join(self._text),)


class _Utf8(_Stage):
    """Bytes to text; invalid bytes become replacement characters."""

    def __init__(self):
        self._partial = b""

    def push(self, piece: bytes) -> Sequence[str]:
        data = self._partial + piece
        text, num = codecs.utf_8_decode(data, "replace", False)
        self._partial = data[num:]
        return (text,)

    def held(self, is_over: bool) -> Sequence[str]:
        return (self._partial.decode("utf-8", "replace"),) if is_over else ()


BYTES: tuple[Callable[[], _Stage], ...] = (_Utf8,)
"""Makers of the stages for tokens that are bytes."""


class _StripText(_Stage):
    """Strip after Fuse: removes a character at the start and the end of a text."""

    def __init__(self, content: str, start: int, stop: int):
        self._content, self._start, self._stop = content, start, stop
        self._last = ""

    def push(self, piece: str) -> Sequence[str]:
        if self._start and piece:
            most = len(piece) - len(piece.lstrip(self._content))
            cut = min(most, self._start)
            piece = piece[cut:]
            self._start = 0 if piece else self._start - cut
        if self._stop:
            piece = self._last + piece
            most = len(piece) - len(piece.rstrip(self._content))
            end = len(piece) - min(most, self._stop)
            piece, self._last = piece[:end], piece[end:]
        return (piece,)


class _ReplaceText(_Stage):
    """Replace after Fuse: a pattern may begin in one piece and end in another."""

    def __init__(self, pattern: str, content: str):
        self._pattern, self._content = pattern, content
        self._last = ""  # may begin the pattern

    def push(self, piece: str) -> Sequence[str]:
        text = self._last + piece
        *before, rest = text.split(self._pattern)
        size = min(len(rest), len(self._pattern) - 1)
        while size and not self._pattern.startswith(rest[-size:]):
            size -= 1
        end = len(rest) - size
        self._last = rest[end:]
        return (self._content.join([*before, rest[:end]]),)

    def held(self, is_over: bool) -> Sequence[str]:
        return (self._last,) if self._last else ()


class _Whole(_Stage):
    """Any other decoder: holds every piece back until the text is over."""

    def __init__(self, decode: Decode, is_joined: bool):
        self._decode, self._is_joined = decode, is_joined
        self._pieces: list[str] = []

    def copy(self) -> Any:
        other = super().copy()
        other._pieces = list(self._pieces)
        return other

    def push(self, piece: str) -> Sequence[str]:
        self._pieces.append(piece)
        return ()

    def held(self, is_over: bool) -> Sequence[str]:
        joined = self._is_joined
        return (self._decode(["".join(self._pieces)] if joined else self._pieces),)


class TextStream:
    """Decodes one token at a time; the module's docstring has the rule.

    Args:
      decoder: what turns tokens into text.
      context: tokens before the text, such as a prompt. The text is then the whole
        decode of context and tokens, less the beginning that it shares with the decode
        of the context: all of that, unless a token completes a character with which
        the context ends.
    """

    def __init__(self, decoder: "StreamDecoder", context: Sequence[int] = ()):
        self._decoder, self._pieces = decoder, decoder.pieces
        self._stages = decoder.stages()
        # What the decode of the context has and the text must not repeat.
        self._known = ""
        if not len(context):
            return
        # The last tokens suffice where a few of them have text of their own and some
        # of it is final.
        num, start = 0, len(context)
        while start and (num < _NUM_CONTEXT or not decoder.is_local):
            start -= 1
            piece = self._pieces[int(context[start])]
            is_byte = isinstance(piece, str) and _BYTE.fullmatch(piece)
            num += bool(piece) and not is_byte
        text = "".join(map(self.push, map(int, context[start:])))
        if start and not text:
            self._stages = decoder.stages()
            for token in context:
                self.push(int(token))
        self._known = self._held(True)

    def push(self, token: int) -> str:
        """Adds a token; returns the characters that are now final."""
        piece = self._pieces[token]
        if piece is None:
            return ""
        pieces: Sequence[Any] = (piece,)
        for stage in self._stages:
            pieces = [made for each in pieces for made in stage.push(each)]
        text = "".join(pieces)
        return self._without_known(text) if self._known else text

    def tail(self) -> str:
        """Returns the text held back, without a character that is not complete."""
        text = self._held(False)
        return text[_num_shared(text, self._known) :] if self._known else text

    def finish(self) -> str:
        """Ends the text; returns the rest of it. The stream is then as new."""
        text = self._without_known(self._held(True))
        self._stages, self._known = self._decoder.stages(), ""
        return text

    def _held(self, is_over: bool) -> str:
        pieces: Sequence[Any] = ()
        for stage in self._stages:
            made: list[Any] = []
            if pieces:
                stage = stage.copy()
                made = [new for each in pieces for new in stage.push(each)]
            pieces = [*made, *stage.held(is_over)]
        return "".join(pieces)

    def _without_known(self, text: str) -> str:
        num = _num_shared(text, self._known)
        self._known = self._known[num:] if num == len(text) else ""
        return text[num:]


def _num_shared(text: str, other: str) -> int:
    num = 0
    while num < len(text) and num < len(other) and text[num] == other[num]:
        num += 1
    return num


class StreamDecoder:
    """A decoder as the `TextStream`s of a tokenizer share it.

    Args:
      piece_of: a token's piece, str or bytes; None if it has no text. Called once for
        each token.
      makers: functions that make the stages, see `stage_makers`.
    """

    def __init__(
        self,
        piece_of: Callable[[int], Any],
        makers: Sequence[Callable[[], _Stage]],
    ):
        self._makers: list[Callable[[], _Stage]] = []
        # Functions of single tokens come first in most decoders: they are applied once
        # to each token of the vocabulary.
        functions: list[Callable[[Any], Any]] = []
        for maker in makers:
            if isinstance(maker, _Each) and not self._makers:
                functions.append(maker.function)
            else:
                self._makers.append(maker)
        self.pieces = _Pieces(piece_of, functions)
        """Token id -> its piece, str or bytes; None if the token has no text."""
        later = [type(stage) for stage in self.stages()]
        self.is_local = not {_Whole, _ReplaceText} & {*later} and (
            _ByteRuns not in later[1:]
        )
        """True if the last tokens of a text determine the state of the stages."""

    def stages(self) -> list[_Stage]:
        """Returns the stages at the beginning of a text."""
        return [make() for make in self._makers]


class _Pieces(dict[int, Any]):
    def __init__(self, piece_of: Callable[[int], Any], functions: Sequence[Callable]):
        self._piece_of, self._functions = piece_of, functions

    def __missing__(self, token: int) -> Any:
        piece = self._piece_of(token)
        if piece is not None:
            for function in self._functions:
                piece = function(piece)
        self[token] = piece
        return piece


def stage_makers(
    state: Mapping[str, Any] | None,
    build: Callable[[Mapping[str, Any]], Decode],
    replaced: Iterable[tuple[str, str]] = (),
) -> list[Callable[[], _Stage]]:
    """Returns functions that make the stages of a decoder.

    Args:
      state: the decoder as `tokenizer.json` has it; None joins tokens by spaces.
      build: makes the decoder of the `tokenizers` library that has such a state.
      replaced: pairs of a pattern and its replacement in the decoded text, in order.
    """
    after = [partial(_ReplaceText, *pair) for pair in replaced]
    if state is None:
        return [partial(_FirstApart, " ".join), *after]
    decoders, makers, is_joined = _flat(state), [], False
    for i, each in enumerate(decoders):
        made = _joined(each, build) if is_joined else _separate(each, build)
        if made is None:
            rest = {"type": "Sequence", "decoders": decoders[i:]}
            return [*makers, partial(_Whole, build(rest), is_joined), *after]
        makers += made
        is_joined = is_joined or each["type"] in ("Fuse", "ByteLevel")
    return [*makers, *after]


def _flat(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [each for part in state["decoders"] for each in _flat(part)]


def _separate(
    state: Mapping[str, Any], build: Callable[[Mapping[str, Any]], Decode]
) -> list[Callable[[], _Stage]] | None:
    """A decoder of tokens; None if it is not known."""
    match state["type"]:
        case "Fuse":
            return []
        case "ByteLevel":
            return [_Each(_bytes_of), _Utf8]
        case "ByteFallback":
            return [_ByteRuns]
        case "Metaspace" | "WordPiece":
            return [partial(_FirstApart, build(state))]
        case "BPEDecoder":
            return [partial(_LastApart, build(state))]
        case "Replace":
            decode = build(state)
            return [_Each(lambda piece: decode([piece]))]
        case "Strip":
            ends = state["content"], state["start"], state["stop"]
            return [_Each(lambda piece: _StripText(*ends).push(piece)[0])]
    return None


def _joined(
    state: Mapping[str, Any], build: Callable[[Mapping[str, Any]], Decode]
) -> list[Callable[[], _Stage]] | None:
    """A decoder of a text in pieces, which is one token; None if it is not known."""
    match state["type"]:
        case "Fuse":
            return []
        case "Metaspace":  # changes single characters, all of them of the first token
            decode = build(state)
            return [_Each(lambda piece: decode([piece]))]
        case "WordPiece":
            return [partial(_ReplaceText, *x) for x in WORD_PIECE if state["cleanup"]]
        case "BPEDecoder" if state["suffix"]:
            return [partial(_ReplaceText, state["suffix"], "")]
        case "Replace" if state["pattern"].get("String"):
            pattern = state["pattern"]["String"]
            return [partial(_ReplaceText, pattern, state["content"])]
        case "Strip":
            return [
                partial(_StripText, state["content"], state["start"], state["stop"])
            ]
    return None


def _bytes_of(piece: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary is written for."""
    if all(char in _BYTES for char in piece):
        return bytes(_BYTES[char] for char in piece)
    return piece.encode()


_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
"""The characters that are written for bytes, as in GPT-2."""
