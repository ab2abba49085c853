"""Tokenizers: text to token ids and back, whole or token by token; chats to prompts.

Two classes with the same methods: `Tokenizer` wraps a `tokenizer.json`, and
`ByteTokenizer` is for models whose tokens are bytes. This module opens no files;
`models/checkpoints.py` reads and writes the folder.
"""

import functools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from jaxkv import validation
from jaxkv.text import chat_templates, special_tokens
from jaxkv.text.stop_strings import StopSearch
from jaxkv.text.streams import (
    BYTE_STAGES,
    CLEANUP,
    Decode,
    DecoderState,
    StreamDecoder,
    TextStream,
    stage_makers,
)
from jaxkv.validation import one_line

NUM_BYTES = 256
"""Token ids of a byte vocabulary that are bytes."""
MAX_BYTE_VOCAB = 264
"""Largest byte vocabulary: 256 bytes and up to 8 special tokens."""

_CLEANUP_FIELD = "clean_up_tokenization_spaces"
_FORCED_CLEANUP = f"{_CLEANUP_FIELD}_for_bpe_even_though_it_will_corrupt_output"


class _ChatTemplates:
    """Chat templates of both tokenizers.

    A tokenizer without a template in its settings raises an error for every
    conversation.
    """

    settings: dict[str, Any]
    encode: Callable[..., list[int]]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **variables: object,
    ) -> str:
        """Renders a conversation as the text the model was trained on.

        Args:
          messages: messages in order and in the template's form, each with "role" and
            "content", or with other keys in place of the content, such as "tool_calls".
            `convert_openai_messages` makes them from messages of OpenAI's API.
          add_generation_prompt: True opens the assistant's next turn.
          chat_template: a template, or the name of one of the model's; None means the
            model's own.
          **variables: variables of the template, such as `tools`, `documents` and
            `enable_thinking`; see `chat_templates.render`.

        Raises:
          ValueError: there is no template, a message lacks role or content, or the
            template refuses the messages or is invalid.
        """
        more = {
            "add_generation_prompt": add_generation_prompt,
            "chat_template": chat_template,
        }
        return self._render(messages, variables | more)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Returns the token ids of the text of `apply_chat_template`.

        The arguments are those of `apply_chat_template`.
        """
        variables["add_generation_prompt"] = add_generation_prompt
        text = self._render(messages, variables)
        return self.encode(text, add_special_tokens=False)

    def _render(
        self, messages: Sequence[Mapping[str, object]], variables: dict[str, object]
    ) -> str:
        template = self.settings.get("chat_template")
        if (chosen := variables.pop("chat_template", None)) is not None:
            named = template if isinstance(template, list) else []
            matches = [x for x in named if x.get("name") == chosen]
            template = matches[-1].get("template") if matches else chosen
        context = {**self.special_tokens, **variables}
        return chat_templates.render(template, messages, context)

    def chat_template(self, tools: Sequence[Mapping[str, object]] | None = None) -> str:
        """Returns the text of the model's template for conversations with `tools`.

        Raises:
          ValueError: the model has no template.
        """
        template = self.settings.get("chat_template")
        return chat_templates.choose_template(template, tools)

    def chat_variables(
        self, tools: Sequence[Mapping[str, object]] | None = None
    ) -> set[str]:
        """Returns the names of the variables that `chat_template` reads.

        Raises:
          ValueError: the model has no template, or it is invalid.
        """
        return chat_templates.read_variables(self.chat_template(tools))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens that have a role, such as `bos_token`."""
        return special_tokens.tokens_by_role(self.settings)


class ByteTokenizer(_ChatTemplates):
    """Tokens 0 to 255 are the bytes of UTF-8 text; token 256, if any, ends a document.

    Args:
      vocab_size: size of the model's vocabulary, in [256, 264].
      eos_ids: tokens that end a text; by default 256 if the vocabulary has it.
    """

    def __init__(self, vocab_size: int, *, eos_ids: Iterable[int] | None = None):
        self.vocab_size = validation.integer(
            "vocab_size",
            vocab_size,
            low=NUM_BYTES,
            below=MAX_BYTE_VOCAB + 1,
            hint=f"in [{NUM_BYTES}, {MAX_BYTE_VOCAB}] for tokens that are bytes",
        )
        if eos_ids is None:
            eos_ids = (NUM_BYTES,) if vocab_size > NUM_BYTES else ()
        self.eos_ids: tuple[int, ...] = tuple(check_ids("eos_ids", eos_ids))
        self.settings = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the UTF-8 bytes of `text`; there are no special tokens to add."""
        validation.boolean("add_special_tokens", add_special_tokens)
        return list(check_text("text", text))

    def offsets(self, text: str) -> list[int]:
        """Returns the start in `text` of the character of each token of `encode`."""
        check_text("text", text)
        return [i for i, letter in enumerate(text) for _ in letter.encode()]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids; broken UTF-8 becomes replacement characters."""
        validation.boolean("skip_special_tokens", skip_special_tokens)
        # Ids past 255 have no text of their own.
        data = bytes(token for token in check_ids("ids", ids) if token < NUM_BYTES)
        return data.decode("utf-8", errors="replace")

    def stream(
        self, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> TextStream:
        """Returns a decoder of one token at a time; see `TextStream`."""
        validation.boolean("skip_special_tokens", skip_special_tokens)
        return TextStream(_BYTE_TOKENS, check_ids("context", context))

    def token_bytes(self) -> list[bytes | None]:
        """Returns the bytes of each token; None for tokens without text."""
        return [
            bytes([token]) if token < NUM_BYTES else None
            for token in range(self.vocab_size)
        ]

    def stop_search(
        self, stops: Sequence[str], context: Sequence[int] = ()
    ) -> StopSearch:
        """Returns a search for stop strings in an answer."""
        check_ids("context", context)  # tokens above 255 have no text
        return StopSearch([*check_texts("stops", stops)])

    def files(self) -> dict[str, str]:
        """Returns no files: the size of the vocabulary describes this tokenizer."""
        return {}


class Tokenizer(_ChatTemplates):
    """A `tokenizer.json` with the settings in `tokenizer_config.json`.

    Args:
      core: tokenizer of the `tokenizers` library. Its truncation and padding are
        disabled.
      eos_ids: tokens that end a text.
      settings: content of `tokenizer_config.json`: special tokens, chat template.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        settings: Mapping[str, object] | None = None,
    ):
        validation.instance("core", core, tokenizers.Tokenizer)
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.eos_ids: tuple[int, ...] = tuple(check_ids("eos_ids", eos_ids))
        self.settings = dict(settings or {})
        self._has_warned = False
        self._decoders: dict[bool, StreamDecoder] = {}
        """Decoders by whether special tokens are hidden."""

    @classmethod
    def from_json(
        cls,
        text: str,
        *,
        settings: Mapping[str, object] | None = None,
        special_map: Mapping[str, object] | None = None,
        added_tokens: Mapping[str, object] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> "Tokenizer":
        """Makes a tokenizer from the content of a folder's files, see `special_tokens`.

        Args:
          text: content of `tokenizer.json`.
          settings: content of `tokenizer_config.json`.
          special_map: content of `special_tokens_map.json`.
          added_tokens: content of `added_tokens.json`.
          eos_ids: tokens that end a text.

        Raises:
          ValueError: the `tokenizers` library cannot read it, or a file names a token
            without text.
        """
        try:
            core = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer: {one_line(error)}") from None
        present = json.loads(text).get("added_tokens") or []
        named = special_tokens.read_special_tokens(
            settings or {}, special_map, added_tokens, present
        )
        core.add_tokens(
            [tokenizers.AddedToken(x.content, **x.flags) for x in named.tokens]
        )
        core.encode_special_tokens = bool(named.settings.get("split_special_tokens"))
        return cls(core, eos_ids=eos_ids, settings=named.settings)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special and added ones included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        Args:
          text: any text; special tokens written in it are recognised.
          add_special_tokens: True adds the tokens that the tokenizer puts around a
            text, such as a first token; False is for the output of a chat template,
            which has them.
        """
        check_text("text", text)
        validation.boolean("add_special_tokens", add_special_tokens)
        encoding = self.core.encode(text, add_special_tokens=add_special_tokens)
        ids = encoding.ids
        if add_special_tokens and ids[:1] == ids[1:2] and not self._has_warned:
            # Empty texts have no tokens; the mask marks tokens that were added around
            # the text.
            if encoding.special_tokens_mask[:2] == [1, 0]:
                self._has_warned = True
                warnings.warn(
                    f"the text begins with {encoding.tokens[0]!r}, and the tokenizer "
                    "puts another one first: encode it with add_special_tokens=False, "
                    "or use encode_chat",
                    stacklevel=2,
                )
        return ids

    def offsets(self, text: str) -> list[int]:
        """Returns the start in `text` of each token of `encode(text)`.

        A token that the tokenizer adds starts where the token before it ends.
        """
        starts = []
        last = 0
        # Some tokenizers exclude spaces from the range of a token, so a token starts at
        # the end of the one before, or with the character that both have a part of.
        for start, end in self.core.encode(text).offsets:
            starts.append(last if start == end else min(start, last))
            last = max(last, end)
        return starts

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids; broken UTF-8 becomes replacement characters."""
        validation.boolean("skip_special_tokens", skip_special_tokens)
        text = self.core.decode(
            check_ids("ids", ids), skip_special_tokens=skip_special_tokens
        )
        for pattern, new in self._replaced:
            text = text.replace(pattern, new)
        return text

    def stream(
        self, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> TextStream:
        """Returns a decoder of one token at a time.

        Args:
          context: tokens before the text, such as a prompt; see `TextStream`.
          skip_special_tokens: as in `decode`.
        """
        validation.boolean("skip_special_tokens", skip_special_tokens)
        decoder = self._decoder(skip_special_tokens)
        return TextStream(decoder, check_ids("context", context))

    def token_bytes(self) -> list[bytes | None]:
        """Returns the bytes of each token inside a text.

        Special tokens, which are hidden in a text, and unused ids have None.

        Raises:
          ValueError: the bytes of a token depend on the tokens around it.
        """
        ids = self.core.get_vocab(with_added_tokens=True).values()
        return self._decoder(True).token_bytes(max(ids, default=-1) + 1)

    def _decoder(self, skip_special_tokens: bool) -> StreamDecoder:
        """Returns the decoder that hides or shows special tokens."""
        if skip_special_tokens not in self._decoders:
            hidden = self._special_texts if skip_special_tokens else frozenset()

            def piece_of(token: int) -> str | None:
                text = self.core.id_to_token(token)
                return None if text in hidden else text

            def build(state: DecoderState) -> Decode:
                document = _NO_PARTS | {"decoder": state}
                return tokenizers.Tokenizer.from_str(
                    json.dumps(document)
                ).decoder.decode

            decoder = self.core.decoder
            state = None if decoder is None else json.loads(decoder.__getstate__())
            stages = stage_makers(state, build, self._replaced)
            self._decoders[skip_special_tokens] = StreamDecoder(piece_of, stages)
        return self._decoders[skip_special_tokens]

    def stop_search(
        self, stops: Sequence[str], context: Sequence[int] = ()
    ) -> StopSearch:
        """Returns a search for stop strings in an answer.

        Args:
          stops: the strings; they may contain special tokens.
          context: tokens before the answer, as in `stream`.
        """
        stops = [*check_texts("stops", stops)]
        context = check_ids("context", context)
        special = [x for x in stops if any(y in x for y in self._special_texts)]
        if not special:
            return StopSearch(stops)
        shown = self.stream(context, skip_special_tokens=False)
        return StopSearch(stops, special, shown)

    @functools.cached_property
    def _special_texts(self) -> frozenset[str]:
        # A token that was once special stays hidden, even if its flag changes.
        def is_hidden(token: int) -> bool:
            shown = self.core.decode([token], skip_special_tokens=False)
            return self.core.decode([token]) != shown

        added = self.core.get_added_tokens_decoder().items()
        hidden = [
            token_entry
            for token, token_entry in added
            if token_entry.special or is_hidden(token)
        ]
        return frozenset(token_entry.content for token_entry in hidden)

    @property
    def _replaced(self) -> tuple[tuple[str, str], ...]:
        """Replacements in a decoded text, as in transformers: pattern, new text."""
        is_asked = self.settings.get(_CLEANUP_FIELD)
        is_bpe = isinstance(self.core.model, tokenizers.models.BPE)
        does_it = is_asked and (not is_bpe or self.settings.get(_FORCED_CLEANUP))
        return CLEANUP if does_it else ()

    def special_ids(self, name: str) -> list[int]:
        """Returns the id of the token with a role such as `eos_token`, in a list."""
        validation.instance("name", name, str)
        token = self.core.token_to_id(self.special_tokens.get(name, ""))
        return [] if token is None else [token]

    def files(self) -> dict[str, str]:
        """Returns the files that describe the tokenizer: name -> text."""
        return {
            "tokenizer.json": self.core.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(self.settings, indent=2) + "\n",
        }


_NO_PARTS = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    **dict.fromkeys(
        ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding")
    ),
}
"""A `tokenizer.json` of a tokenizer without components."""


def check_text(name: str, text: object) -> bytes:
    """Checks a text, and returns it in UTF-8.

    Raises:
      ValueError: the value is not a str, or has a lone surrogate.
    """
    if not isinstance(text, str):
        value_text = validation.format_value(text)
        raise ValueError(f"{name}={value_text} must be a str; decode bytes first")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from None


def check_ids(name: str, ids: Any) -> list[int]:
    """Checks token ids, a sequence or an iterator, and returns them in a list.

    Ids past the vocabulary are accepted, because a model may have more tokens than its
    tokenizer; they have no text.

    Raises:
      ValueError: the value is not a sequence of integers in [0, 2**31).
    """
    ids = list(ids) if isinstance(ids, Iterator) else ids
    # A twentieth of the time of the check below, for the texts of single tokens.
    if type(ids) is list and {*map(type, ids)} == {int}:
        if min(ids) >= 0 and max(ids) < validation.INT32:
            return ids
    return validation.token_ids(name, ids, vocab_size=None).tolist()


def check_texts(name: str, texts: Iterable[str]) -> Iterator[str]:
    """Checks texts, and yields them.

    Raises:
      ValueError: the value is one text, or has an entry that `check_text` refuses.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        value_text = validation.format_value(texts)
        raise ValueError(f"{name}={value_text} must be a sequence of texts")
    for text in texts:
        check_text(name, text)
        yield text


_BYTE_TOKENS = StreamDecoder(
    lambda token: bytes([token]) if 0 <= token < NUM_BYTES else None, BYTE_STAGES
)
