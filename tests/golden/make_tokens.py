"""Writes `named_tokens.json` and `chats.json`; to be run by hand with transformers.

`named_tokens.json`: random tokenizer folders and the tokenizers that transformers
loads from them. One or several files of a folder declare special and added tokens. The
results are all added tokens with their flags, the roles, the end token, and some texts
encoded and decoded.

`chats.json`: chat templates, their arguments and the rendered text.

    python tests/golden/make_tokens.py
"""

import json
import pathlib
import random
import tempfile
from typing import Any

import tokenizers
import transformers

HERE = pathlib.Path(__file__).parent
NUM_FOLDERS = 24
WORDS = ("a", "b", "c", ".", "'s", "hello", "[UNK]", "<s>", "</s>", "<mask>")
TOKENS = ("<s>", "</s>", "<pad>", "<tool>", "<think>", "<new 1>", "<image>", "hello")
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TEXTS = ("a<tool> hello<think>b", "<s>a <new 1> </s>.", "hello 's <image><pad> c")


def random_token(rng: random.Random, **more: str) -> dict[str, Any]:
    """Returns an added token with random flags."""
    flags = {name: rng.random() < 0.3 for name in FLAGS}
    return {"content": rng.choice(TOKENS), **flags, **more}


def random_entry(rng: random.Random) -> Any:
    """Returns a random value of a token role: text, object or None."""
    typed = random_token(rng, __type="AddedToken")
    return rng.choice((rng.choice(TOKENS), rng.choice(TOKENS), typed, None))


def random_files(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Returns random contents of the files that declare tokens, by file stem."""
    settings: dict[str, Any] = {}
    for role in (*ROLES, "image_token"):
        if rng.random() < 0.4:
            settings[role] = random_entry(rng)
    if rng.random() < 0.4:
        settings["additional_special_tokens"] = rng.sample(TOKENS, rng.randrange(3))
    if rng.random() < 0.4:
        names = rng.sample(TOKENS, 2)
        as_object = dict(zip(("video_token", "x"), names, strict=True))
        settings["extra_special_tokens"] = rng.choice((names, as_object, []))
    if rng.random() < 0.4:
        settings["added_tokens_decoder"] = {
            str(10 + i): random_token(rng)
            for i in rng.sample(range(6), rng.randrange(4))
        }
    if rng.random() < 0.2:
        settings["split_special_tokens"] = True
    settings["clean_up_tokenization_spaces"] = rng.random() < 0.5
    files = {"tokenizer_config": settings}
    if rng.random() < 0.5:
        untyped = random_token(rng)
        untyped.pop("special")
        token_map: dict[str, Any] = {}
        token_map |= {role: rng.choice(TOKENS) for role in ROLES if rng.random() < 0.4}
        token_map[rng.choice(ROLES)] = untyped
        if rng.random() < 0.4:
            token_map["additional_special_tokens"] = rng.sample(TOKENS, 2)
        files["special_tokens_map"] = token_map
    if rng.random() < 0.5:
        sample = rng.sample(TOKENS, 3)
        files["added_tokens"] = {text: 10 + i for i, text in enumerate(sample)}
    return files


def random_core(rng: random.Random) -> tokenizers.Tokenizer:
    """Returns a word-level tokenizer with random added tokens."""
    vocab = {word: i for i, word in enumerate(WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for text in rng.sample(TOKENS, rng.randrange(4)):
        add = rng.choice((core.add_tokens, core.add_special_tokens))
        add([tokenizers.AddedToken(text, lstrip=rng.random() < 0.3)])
    return core


def named_tokens(seed: int) -> dict[str, Any]:
    """Returns a random tokenizer folder and the tokenizer that transformers loads."""
    rng = random.Random(seed)
    core = random_core(rng)
    files = random_files(rng)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        core.save(str(folder / "tokenizer.json"))
        for file, content in files.items():
            (folder / f"{file}.json").write_text(json.dumps(content))
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [rng.choices(range(len(tokenizer)), k=8) for _ in range(3)]
    return {
        "core": json.loads(core.to_str()),
        "files": files,
        "added": {
            token: [text.content, *(getattr(text, name) for name in FLAGS)]
            for token, text in sorted(tokenizer.added_tokens_decoder.items())
        },
        "roles": dict(tokenizer.special_tokens_map),
        "eos": tokenizer.eos_token_id,
        "encoded": [[text, tokenizer.encode(text)] for text in TEXTS],
        "decoded": [
            [
                token_ids,
                tokenizer.decode(token_ids),
                tokenizer.decode(token_ids, skip_special_tokens=True),
            ]
            for token_ids in ids
        ],
    }


CALL = {"function": {"name": "f", "arguments": {"x": "<1>", "y": [1, 2.5, None]}}}
USER = {"role": "user", "content": "hi"}
TURNS = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
LOOP = "{% for m in messages %}"
CHATS: list[tuple[Any, list[dict[str, Any]], dict[str, Any]]] = [
    ("{% if tools is not none %}T{% else %}-{% endif %}{{ tools }}", [USER], {}),
    ("{{ documents is none }}{{ documents is defined }}", [USER], {}),
    ("{{ enable_thinking is defined }}", [USER], {}),
    ("{{ enable_thinking }}", [USER], {"enable_thinking": False}),
    ("{{ tools | tojson(indent=2) }}", [USER], {"tools": [CALL]}),
    ("{{ documents[0].title }}", [USER], {"documents": [{"title": "<é>"}]}),
    (LOOP + "{{ m.role }}:{{ m.content }}{{ m.tool_calls }};{% endfor %}", TURNS, {}),
    (LOOP + "{% if m.content is defined %}c{% endif %}{% endfor %}", TURNS, {}),
    (LOOP + "{{ m.tool_calls | tojson }}{% endfor %}", TURNS[1:], {}),
    (LOOP + "{{ m | tojson(sort_keys=true) }}{% endfor %}", [USER], {}),
    ("{{ messages | tojson(separators=(',', ':')) }}", TURNS, {}),
    ("{{ messages | tojson(true) }}", [{"role": "user", "content": "é<"}], {}),
    (LOOP + "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}"
     "{% endfor %}", TURNS, {}),
    (LOOP + "{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}", TURNS,
     {}),
    ("{% set ns = namespace(a=1, self=2) %}{% set ns.a = 3 %}{{ ns.a }}", [USER], {}),
    ("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}", [USER], {}),
    ("{{ bos_token }}", [USER], {"bos_token": "<other>"}),
    (LOOP + "{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
     [{"role": "assistant", "content": "a", "reasoning": "why"}], {}),
    ("{{ dict(a=1) }}{{ range(3) | list }}{{ (1, 2) }}{{ 'a' ~ none }}", [USER], {}),
    ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
     [USER], {}),
    ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
     [USER], {"tools": [CALL]}),
    ([{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}],
     [USER], {"chat_template": "rag"}),
]  # fmt: skip
"""Templates, messages, and further arguments."""


def chat(
    template: Any, messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Returns a chat with its rendered text."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **arguments
    )
    return {
        "template": template,
        "messages": messages,
        "arguments": arguments,
        "text": text,
    }


def write(name: str, cases: list[dict[str, Any]]) -> None:
    """Writes a JSON list with one case per line."""
    lines = ",\n".join(json.dumps(case) for case in cases)
    (HERE / name).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    write("named_tokens.json", [named_tokens(seed) for seed in range(NUM_FOLDERS)])
    write("chats.json", [chat(*case) for case in CHATS])
