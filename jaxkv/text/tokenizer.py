"""Text to token ids and back, whole or token by token; chats to prompts.

Two tokenizers with the same methods: `Tokenizer` around a `tokenizer.json`, and
`ByteTokenizer` for models whose tokens are bytes. Nothing here opens a file: the folder
is read and written in `models/checkpoints.py`.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from jaxkv.text import chat_templates

NUM_BYTES = 256
# A byte vocabulary may have a few special tokens after the 256 bytes, never many.
MAX_BYTE_VOCAB = 264

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# At most three bytes of a UTF-8 character can be there while the fourth is missing.
MAX_HELD = 3
# Token ids that decode to no whole character for so long are not text: let them go.
MAX_PENDING = 32

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TextStream:
    """Decodes one token at a time and never gives out half a character.

    What `push` returned so far plus `finish` is the text of all tokens whenever their
    bytes are valid UTF-8. Where they are not, replacement characters stand in.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        # Text is decoded from `_start`, one clean boundary before the last one
        # (`_clean`), because some decoders treat the first token of a text apart.
        self._start = 0
        self._clean = 0
        self._num_sent = 0  # characters of the text from `_start` that are out

    def push(self, token: int) -> str:
        """Adds a token; returns the characters that are now certain, often one word."""
        self._ids.append(int(token))
        text = self._decode(self._ids[self._start :])
        if len(self._ids) - self._clean > MAX_PENDING:
            new = text[self._num_sent :]
            self._start = self._clean = len(self._ids)
            self._num_sent = 0
        elif not text.endswith(REPLACEMENT):
            new = text[self._num_sent :]
            self._start, self._clean = self._clean, len(self._ids)
            self._num_sent = len(self._decode(self._ids[self._start :]))
        else:
            num_held = len(text) - len(text.rstrip(REPLACEMENT))
            stable = len(text) - min(num_held, MAX_HELD)
            new = text[self._num_sent : stable]
            self._num_sent = max(self._num_sent, stable)
        return new

    def finish(self) -> str:
        """Returns what was held back: replacement characters for a cut character."""
        text = self._decode(self._ids[self._start :])[self._num_sent :]
        self._ids, self._start, self._clean, self._num_sent = [], 0, 0, 0
        return text


class ByteStream:
    """The `TextStream` of byte tokens: an incremental UTF-8 decoder."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Adds a token; returns the character it completes, if it does."""
        return self._decoder.decode(_bytes_of([token]))

    def finish(self) -> str:
        """Returns a replacement character if a character was cut off."""
        return self._decoder.decode(b"", final=True)


class _Chats:
    """What the tokenizers have in common: conversations to prompts.

    One without a chat template among its settings refuses all of them.
    """

    settings: dict[str, Any]
    encode: Callable[..., list[int]]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Renders a conversation as the text the model was trained on.

        Args:
          messages: in order, each with at least "role" and "content".
          add_generation_prompt: whether to open the assistant's next turn.
          tools: JSON descriptions of functions, for templates that know of them.

        Raises:
          ValueError: if there is no template, if a message lacks role or content, or if
            the template refuses the messages or is itself broken.
        """
        return chat_templates.render(
            self.settings.get("chat_template"),
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **self.special_tokens,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Returns the token ids of `apply_chat_template`'s text."""
        text = self.apply_chat_template(messages, add_generation_prompt, tools=tools)
        return self.encode(text, add_special_tokens=False)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of the special tokens that have a role, such as `bos_token`."""
        texts = {name: token_text(self.settings.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in texts.items() if text is not None}


class ByteTokenizer(_Chats):
    """Tokens 0 to 255 are the bytes of UTF-8 text; 256, if there, ends a document.

    Args:
      vocab_size: size of the model's vocabulary, in [256, 264].
      eos_ids: the tokens that end a text; by default 256 where the vocabulary has it.
    """

    def __init__(self, vocab_size: int, *, eos_ids: Iterable[int] | None = None):
        if not NUM_BYTES <= vocab_size <= MAX_BYTE_VOCAB:
            raise ValueError(
                f"{vocab_size=} must be in [{NUM_BYTES}, {MAX_BYTE_VOCAB}] "
                "for tokens that are bytes"
            )
        self.vocab_size = vocab_size
        if eos_ids is None:
            eos_ids = (NUM_BYTES,) if vocab_size > NUM_BYTES else ()
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        self.settings = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the UTF-8 bytes of `text`; there are no special tokens to add."""
        del add_special_tokens
        return list(_utf8(text))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the ids' text; broken UTF-8 becomes replacement characters."""
        del skip_special_tokens  # ids past 255 have no text of their own
        return _bytes_of(ids).decode("utf-8", errors="replace")

    def stream(self) -> ByteStream:
        """Returns a decoder that takes one token at a time."""
        return ByteStream()

    def files(self) -> dict[str, str]:
        """Returns the files that describe it: none, the vocabulary's size does."""
        return {}


class Tokenizer(_Chats):
    """A `tokenizer.json`, with the settings that Hugging Face keeps beside it.

    Args:
      core: the tokenizer itself. Its truncation and padding are switched off.
      eos_ids: the tokens that end a text.
      settings: what `tokenizer_config.json` holds: special tokens, chat template.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        settings: Mapping[str, Any] | None = None,
    ):
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        self.settings = dict(settings or {})

    @classmethod
    def from_json(cls, text: str, **kwargs: Any) -> "Tokenizer":
        """Builds it from the text of a `tokenizer.json`.

        Raises:
          ValueError: if the `tokenizers` library cannot read it.
        """
        try:
            core = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer: {_one_line(error)}") from None
        return cls(core, **kwargs)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, special and added ones included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        Args:
          text: any text; special tokens written out in it are recognised.
          add_special_tokens: whether to add what the tokenizer puts around a text,
            such as a first token; False for a chat template's output, which has it.
        """
        _utf8(text)
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the ids' text; broken UTF-8 becomes replacement characters."""
        return self.core.decode(
            [int(token) for token in ids], skip_special_tokens=skip_special_tokens
        )

    def stream(self) -> TextStream:
        """Returns a decoder that takes one token at a time."""
        return TextStream(self.decode)

    def special_ids(self, name: str) -> list[int]:
        """Returns the id of the token with a role, such as `eos_token`, or nothing."""
        token = self.core.token_to_id(self.special_tokens.get(name, ""))
        return [] if token is None else [token]

    def files(self) -> dict[str, str]:
        """Returns the files that describe it: name -> text."""
        return {
            "tokenizer.json": self.core.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(self.settings, indent=2) + "\n",
        }


def token_text(token: Any) -> str | None:
    """Returns a token's text from the two ways `tokenizer_config.json` writes one."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not valid Unicode: {error}") from None


def _bytes_of(ids: Iterable[int]) -> bytes:
    """The bytes among token ids."""
    return bytes(int(token) for token in ids if 0 <= token < NUM_BYTES)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
