"""Incremental detokenizer: token ids to text, one token at a time.

The pieces that a `TextStream` returns, concatenated, equal the decode of all tokens at
once. `push` returns the text that later tokens cannot change and holds back:

* the bytes of an incomplete character;
* a run of byte-fallback tokens such as `<0xE6>` while it is valid UTF-8, since one
  invalid byte turns every byte of the run into a replacement character;
* the last token of a `BPEDecoder`, which ends in a space only if a token follows;
* after `Fuse`, the last characters that `Strip` removes at the end of a text, and
  characters that may begin a pattern of `Replace`;
* all text, if a decoder may change it as a whole: a regular expression after `Fuse`,
  CTC, and unknown decoders.

A decoder is a chain of stages. Each stage processes the pieces of the stage before it,
with a state of bounded size apart from the text that is held back, so the time is
linear in the number of tokens.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypedDict

from jaxkv import validation
from jaxkv.validation import INT32

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[list[str]], str]
"""A decoder of the `tokenizers` library: a list of pieces to text."""


class DecoderState(TypedDict, total=False):
    """A decoder in `tokenizer.json`; the fields depend on its type."""

    type: str
    decoders: list["DecoderState"]
    content: str
    start: int
    stop: int
    cleanup: bool
    suffix: str
    pattern: dict[str, str]


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
"""Replacements of a tokenizer that cleans up spaces: pattern, new text."""
WORD_PIECE = (*CLEANUP[:7], (" do not", " don't"), *CLEANUP[7:])
"""Replacements of the WordPiece decoder."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_NUM_CONTEXT = 4
"""Number of tokens that determine the state of every stage: an incomplete character has
at most three bytes."""


class _Stage:
    """One decoder, applied piece by piece."""

    def push(self, piece: Any) -> Sequence[Any]:
        """Adds a piece; returns the pieces that are final."""
        raise NotImplementedError

    def held(self, is_over: bool) -> Sequence[Any]:
        """Returns the pieces that `push` holds back.

        Args:
          is_over: True if the text ends here; False omits pieces that later tokens may
            complete or remove.
        """
        del is_over
        return ()

    def copy[S: "_Stage"](self: S) -> S:
        """Returns a stage in the same state."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other


class _MapStage(_Stage):
    """Applies a function to each piece; has no state."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __call__(self) -> "_MapStage":
        return self

    def push(self, piece: Any) -> Sequence[Any]:
        return (self.function(piece),)


class _FirstTokenStage(_Stage):
    """A decoder that treats the first token differently, such as Metaspace."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._is_first = True

    def push(self, piece: str) -> Sequence[str]:
        if self._is_first:
            self._is_first = False
            return (self._decode([piece]),)
        return (self._decode(["", piece]),)


class _LastTokenStage(_Stage):
    """A decoder that treats the last token differently: BPEDecoder."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._last: str | None = None

    def push(self, piece: str) -> Sequence[str]:
        before = self._last
        self._last = piece
        return () if before is None else (self._decode([before, ""]),)

    def held(self, is_over: bool) -> Sequence[str]:
        return () if self._last is None else (self._decode([self._last]),)


class _ByteRunStage(_Stage):
    """ByteFallback: runs of byte tokens become text, or replacement characters."""

    def __init__(self):
        self._length = 0  # bytes of the run
        self._is_valid = True
        self._text: list[str] = []  # its complete characters, while it is valid
        self._partial = b""

    def copy(self) -> "_ByteRunStage":
        other = super().copy()
        other._text = list(self._text)
        return other

    def push(self, piece: str) -> Sequence[str]:
        match = _BYTE.fullmatch(piece)
        if match is None:
            if not self._length:
                return (piece,)
            before = self.held(True)
            self.__init__()
            return (*before, piece)
        self._length += 1
        if not self._is_valid:
            return (REPLACEMENT,)
        data = self._partial + bytes([int(match[1], 16)])
        try:
            text, num = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._is_valid = False
            self._text = []
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


class _Utf8Stage(_Stage):
    """Decodes bytes to text; invalid bytes become replacement characters."""

    def __init__(self):
        self._partial = b""

    def push(self, piece: bytes) -> Sequence[str]:
        data = self._partial + piece
        text, num = codecs.utf_8_decode(data, "replace", False)
        self._partial = data[num:]
        return (text,)

    def held(self, is_over: bool) -> Sequence[str]:
        return (self._partial.decode("utf-8", "replace"),) if is_over else ()


BYTE_STAGES: tuple[Callable[[], _Stage], ...] = (_Utf8Stage,)
"""Stage constructors for tokens that are bytes."""


class _StripStage(_Stage):
    """Strip after Fuse: removes a character at the start and the end of a text."""

    def __init__(self, content: str, start: int, stop: int):
        self._content = content
        self._start = start
        self._stop = stop
        self._last = ""

    @property
    def has_stop(self) -> bool:
        """True if characters at the end of a text are removed."""
        return self._stop > 0

    def push(self, piece: str) -> Sequence[str]:
        if self._start and piece:
            num_stripped = len(piece) - len(piece.lstrip(self._content))
            cut = min(num_stripped, self._start)
            piece = piece[cut:]
            self._start = 0 if piece else self._start - cut
        if self._stop:
            piece = self._last + piece
            num_stripped = len(piece) - len(piece.rstrip(self._content))
            end = len(piece) - min(num_stripped, self._stop)
            self._last = piece[end:]
            piece = piece[:end]
        return (piece,)


class _ReplaceStage(_Stage):
    """Replace after Fuse: a match may span several pieces."""

    def __init__(self, pattern: str, content: str):
        self._pattern = pattern
        self._content = content
        self._last = ""  # may begin the pattern

    def push(self, piece: str) -> Sequence[str]:
        text = self._last + piece
        *before, tail = text.split(self._pattern)
        size = min(len(tail), len(self._pattern) - 1)
        while size and not self._pattern.startswith(tail[-size:]):
            size -= 1
        end = len(tail) - size
        self._last = tail[end:]
        return (self._content.join([*before, tail[:end]]),)

    def held(self, is_over: bool) -> Sequence[str]:
        return (self._last,) if self._last else ()


class _BufferStage(_Stage):
    """Any other decoder: holds all pieces back until the text ends."""

    def __init__(self, decode: Decode, is_joined: bool):
        self._decode = decode
        self._is_joined = is_joined
        self._pieces: list[str] = []

    def copy(self) -> "_BufferStage":
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
    """Decodes one token at a time, by the rules in the module's docstring.

    Args:
      decoder: the decoder of the tokens.
      context: tokens before the text, such as a prompt. The text is then the decode of
        context and tokens without the prefix that it shares with the decode of the
        context; that prefix is the whole decode of the context, unless a token
        completes a character at its end.
    """

    def __init__(self, decoder: "StreamDecoder", context: Sequence[int] = ()):
        self._decoder = decoder
        self._pieces = decoder.pieces
        self._stages = decoder.stages()
        # Text of the context that the stream must not repeat.
        self._known = ""
        if not len(context):
            return
        # The last tokens suffice if some of them have text of their own and part of it
        # is final.
        num = 0
        start = len(context)
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
        """Adds a token; returns the text that has become final."""
        if type(token) is not int or not 0 <= token < INT32:
            token = validation.integer("token", token)
        piece = self._pieces[token]
        if piece is None:
            return ""
        pieces = (piece,)
        for stage in self._stages:
            pieces = [
                new_piece
                for input_piece in pieces
                for new_piece in stage.push(input_piece)
            ]
        text = "".join(pieces)
        return self._without_known(text) if self._known else text

    def tail(self) -> str:
        """Returns the text that is held back, without an incomplete character."""
        text = self._held(False)
        return text[_num_shared(text, self._known) :] if self._known else text

    def finish(self) -> str:
        """Ends the text; returns its remainder and resets the stream."""
        text = self._without_known(self._held(True))
        self._stages = self._decoder.stages()
        self._known = ""
        return text

    def _held(self, is_over: bool) -> str:
        pieces = ()
        for stage in self._stages:
            new_pieces = []
            if pieces:
                stage = stage.copy()
                new_pieces = [new for piece in pieces for new in stage.push(piece)]
            pieces = [*new_pieces, *stage.held(is_over)]
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
    """The detokenizer of a vocabulary, shared by its `TextStream`s.

    Args:
      piece_of: returns a token's piece, str or bytes; None if it has no text. Called
        once for each token.
      makers: constructors of the stages, see `stage_makers`.
    """

    def __init__(
        self,
        piece_of: Callable[[int], str | bytes | None],
        makers: Sequence[Callable[[], _Stage]],
    ):
        self._makers: list[Callable[[], _Stage]] = []
        # In most decoders the first stages are functions of single tokens: they are
        # applied once to each token of the vocabulary.
        functions = []
        for maker in makers:
            if isinstance(maker, _MapStage) and not self._makers:
                functions.append(maker.function)
            else:
                self._makers.append(maker)
        self.pieces = _Pieces(piece_of, functions)
        """Token id -> its piece, str or bytes; None if the token has no text."""
        later = [type(stage) for stage in self.stages()]
        self.is_local = not {_BufferStage, _ReplaceStage} & {*later} and (
            _ByteRunStage not in later[1:]
        )
        """True if the last tokens of a text determine the state of the stages."""

    def stages(self) -> list[_Stage]:
        """Returns the stages in their initial state."""
        return [make() for make in self._makers]

    def token_bytes(self, num: int) -> list[bytes | None]:
        """Returns the bytes of the first `num` tokens inside a text.

        Tokens without text have None.

        Raises:
          ValueError: the bytes of a token depend on the tokens around it.
        """
        stages = self.stages()
        local = _Utf8Stage, _ByteRunStage, _FirstTokenStage
        for stage in stages:
            at_start = isinstance(stage, _StripStage) and not stage.has_stop
            if not isinstance(stage, local) and not at_start:
                raise ValueError(
                    "the tokenizer's decoder changes text over several tokens, so "
                    "single tokens have no bytes"
                )
        has_byte_tokens = any(isinstance(x, _ByteRunStage) for x in stages)
        first_stages = [x for x in stages if isinstance(x, _FirstTokenStage)]
        for stage in first_stages:
            stage.push("")  # a token before all others

        def bytes_of(piece: str | bytes | None) -> bytes | None:
            if piece is None or isinstance(piece, bytes):
                return piece
            if has_byte_tokens and (match := _BYTE.fullmatch(piece)):
                return bytes([int(match[1], 16)])
            for stage in first_stages:
                piece = stage.push(piece)[0]
            return piece.encode()

        return [bytes_of(self.pieces[token]) for token in range(num)]


class _Pieces(dict[int, Any]):
    def __init__(
        self,
        piece_of: Callable[[int], str | bytes | None],
        functions: Sequence[Callable],
    ):
        self._piece_of = piece_of
        self._functions = functions

    def __missing__(self, token: int) -> str | bytes | None:
        piece = self._piece_of(token)
        if piece is not None:
            for function in self._functions:
                piece = function(piece)
        self[token] = piece
        return piece


def stage_makers(
    state: DecoderState | None,
    build: Callable[[DecoderState], Decode],
    replaced: Iterable[tuple[str, str]] = (),
) -> list[Callable[[], _Stage]]:
    """Returns constructors of the stages of a decoder.

    Args:
      state: the decoder in `tokenizer.json`; None joins tokens by spaces.
      build: makes the decoder of the `tokenizers` library from such a state.
      replaced: pairs of a pattern and its replacement in the decoded text, in order.
    """
    after = [partial(_ReplaceStage, *pair) for pair in replaced]
    if state is None:
        return [partial(_FirstTokenStage, " ".join), *after]
    decoders = _flat(state)
    makers = []
    is_joined = False
    for i, decoder in enumerate(decoders):
        stage_list = _joined(decoder, build) if is_joined else _separate(decoder, build)
        if stage_list is None:
            tail_state: DecoderState = {"type": "Sequence", "decoders": decoders[i:]}
            return [
                *makers,
                partial(_BufferStage, build(tail_state), is_joined),
                *after,
            ]
        makers += stage_list
        is_joined = is_joined or decoder["type"] in ("Fuse", "ByteLevel")
    return [*makers, *after]


def _flat(state: DecoderState) -> list[DecoderState]:
    if state["type"] != "Sequence":
        return [state]
    return [decoder for part in state["decoders"] for decoder in _flat(part)]


def _separate(
    state: DecoderState, build: Callable[[DecoderState], Decode]
) -> list[Callable[[], _Stage]] | None:
    """Returns the stages of a decoder applied to tokens; None if it is unknown."""
    match state["type"]:
        case "Fuse":
            return []
        case "ByteLevel":
            return [_MapStage(_bytes_of), _Utf8Stage]
        case "ByteFallback":
            return [_ByteRunStage]
        case "Metaspace" | "WordPiece":
            return [partial(_FirstTokenStage, build(state))]
        case "BPEDecoder":
            return [partial(_LastTokenStage, build(state))]
        case "Replace":
            decode = build(state)
            return [_MapStage(lambda piece: decode([piece]))]
        case "Strip":
            ends = state["content"], state["start"], state["stop"]
            return [_MapStage(lambda piece: _StripStage(*ends).push(piece)[0])]
    return None


def _joined(
    state: DecoderState, build: Callable[[DecoderState], Decode]
) -> list[Callable[[], _Stage]] | None:
    """Returns the stages of a decoder applied to joined text; None if it is unknown."""
    match state["type"]:
        case "Fuse":
            return []
        case "Metaspace":  # changes single characters, all of them of the first token
            decode = build(state)
            return [_MapStage(lambda piece: decode([piece]))]
        case "WordPiece":
            return [partial(_ReplaceStage, *x) for x in WORD_PIECE if state["cleanup"]]
        case "BPEDecoder" if state["suffix"]:
            return [partial(_ReplaceStage, state["suffix"], "")]
        case "Replace" if state["pattern"].get("String"):
            pattern = state["pattern"]["String"]
            return [partial(_ReplaceStage, pattern, state["content"])]
        case "Strip":
            return [
                partial(_StripStage, state["content"], state["start"], state["stop"])
            ]
    return None


def _bytes_of(piece: str) -> bytes:
    """Returns the bytes of a token in a byte-level vocabulary."""
    if all(char in _BYTE_OF_CHARACTER for char in piece):
        return bytes(_BYTE_OF_CHARACTER[char] for char in piece)
    return piece.encode()


_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _SHOWN}
_BYTE_OF_CHARACTER |= {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
"""The characters that are written for bytes, as in GPT-2."""
