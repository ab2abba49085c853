"""Small tokenizers with every decoder of the library, random answers, and the slow
definition of an answer's text."""

import random
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models
from tokenizers.decoders import (
    CTC,
    BPEDecoder,
    ByteFallback,
    ByteLevel,
    Fuse,
    Metaspace,
    Replace,
    Sequence,
    Strip,
    WordPiece,
)

from jaxkv.text import Tokenizer

_SPACE = Replace("▁", " ")
DECODERS: dict[str, Any] = {
    "none": None,
    "llama": Sequence([_SPACE, ByteFallback(), Fuse(), Strip(" ", 1, 0)]),
    "gemma": Sequence([_SPACE, ByteFallback(), Fuse()]),
    "byte fallback": Sequence([ByteFallback(), Fuse()]),
    "metaspace": Metaspace(),
    "metaspace never": Metaspace(prepend_scheme="never"),
    "word piece": WordPiece(),
    "word piece as it is": WordPiece(cleanup=False),
    "bpe": BPEDecoder(),
    "byte level": ByteLevel(),
    "ctc": CTC(),
    "bytes, metaspace": Sequence([ByteFallback(), Metaspace()]),
    "metaspace, bytes": Sequence([Metaspace(), ByteFallback(), Fuse()]),
    "metaspace, bpe": Sequence([Metaspace(), BPEDecoder()]),
    "bpe, fused metaspace": Sequence([BPEDecoder(), Fuse(), Metaspace()]),
    "byte level, word piece": Sequence([ByteLevel(), WordPiece()]),
    "bytes, byte level": Sequence([ByteFallback(), ByteLevel()]),
    "ctc, word piece": Sequence([CTC(), WordPiece()]),
    "fuse, byte level": Sequence([Fuse(), ByteLevel()]),
    "fuse, bpe": Sequence([Fuse(), BPEDecoder()]),
    "nested": Sequence([Sequence([_SPACE]), Sequence([ByteFallback(), Fuse()])]),
    "patterns over tokens": Sequence(
        [ByteFallback(), Fuse(), Replace("ab", "ba"), Replace("▁▁", "_")]
    ),
    "expression over tokens": Sequence([Fuse(), Replace(Regex("a+b?"), "x")]),
}
"""Decoders by name."""

WORDS = (
    *("▁", "▁▁", "▁a", "a", "b", "ab", "▁ab▁", "", " ", "  ", "aa", " a "),
    *("##a", "##", "a</w>", "</w>", "b</w>c</w>", "|", "<pad>"),
    *(".", " .", "'", "'s", "n't", " do not", "not", "do", "\ufffd", "日", "é"),
    *("Ġ", "Ġa", "Ċ", "æĹ", "¥", "æ", "ĹĶ", "ðŁ", "ĺ", "Ģ", "ÿ"),
    *("<0x4g>", "<0x+1>", "<0xe6>"),
)
SPECIAL = ("<s>", "</s>", "<end of turn>")
ADDED = ("<think>", "<0x0A>x")


def tokenizer_of(decoder: Any, **settings: Any) -> Tokenizer:
    """Returns a word tokenizer with byte, special and added tokens."""
    words = dict.fromkeys((*WORDS, *(f"<0x{i:02X}>" for i in range(256)), "<s>"))
    vocab = {word: i for i, word in enumerate(words)}
    core = tokenizers.Tokenizer(models.WordLevel(vocab, "<s>"))
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    core.add_tokens(list(ADDED))
    if decoder is not None:
        core.decoder = decoder
    return Tokenizer(core, settings=settings)


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    """Returns the ids of tokens by their texts; "bytes:x" means the bytes of x."""
    ids: list[int | None] = []
    for text in texts:
        words = [text]
        if text.startswith("bytes:"):
            words = [f"<0x{byte:02X}>" for byte in text[6:].encode()]
        ids += map(tokenizer.core.token_to_id, words)
    return [token for token in ids if token is not None]


def random_ids(rng: random.Random, tokenizer: Tokenizer, num: int) -> list[int]:
    """Random words, special and unknown tokens, and complete and broken byte tokens."""
    ids: list[int] = []
    while len(ids) < num:
        match rng.choices(range(5), (35, 10, 15, 5, 35))[0]:
            case 0:
                character_ids = ids_of(
                    tokenizer, "bytes:" + rng.choice(("日", "é", "😀", "a"))
                )
                ids += character_ids[: rng.choice((1, 2, 3, 4, 4, 4))]
            case 1:
                ids += ids_of(tokenizer, f"<0x{rng.randrange(256):02X}>")
            case 2:
                ids += ids_of(tokenizer, rng.choice((*SPECIAL, *ADDED)))
            case 3:
                ids.append(tokenizer.vocab_size + rng.randrange(5))
            case _:
                ids += ids_of(tokenizer, rng.choice(WORDS))
    return ids[:num]


def text_after(
    tokenizer: Any, prompt: list[int], answer: list[int], skip: bool = True
) -> str:
    """Returns the text of an answer by its definition: two full decodes."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode(prompt + answer, skip_special_tokens=skip)
    shared = 0
    while text[: shared + 1] == before[: shared + 1] and shared < len(text):
        shared += 1
    return text[shared:]
