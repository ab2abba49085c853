"""Special and added tokens of a folder that are named outside of `tokenizer.json`.

Three files may name them: `tokenizer_config.json`, and in older folders
`special_tokens_map.json` and `added_tokens.json`. The rules are those of transformers
5.24: the two older files are used only if `tokenizer_config.json` has no
`added_tokens_decoder`, and then `special_tokens_map.json` has precedence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Roles that every tokenizer knows."""

EXTRA = "extra_special_tokens"
_OLD_EXTRA = "additional_special_tokens"
_ROLE_FIELD = "model_specific_special_tokens"
"""Setting with the tokens of roles that only some models have: role -> token."""
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class AddedToken(NamedTuple):
    """A token that is matched in a text before the model splits it."""

    content: str
    """Text of the token."""
    flags: Mapping[str, bool]
    """How the token is matched and whether it is special, with the library's flag
    names."""


class SpecialTokens(NamedTuple):
    """Tokens and settings from the files."""

    settings: dict[str, Any]
    """The settings, including those of `special_tokens_map.json` if it is used."""
    tokens: list[AddedToken]
    """Tokens to add to the tokenizer, in order."""


def read_special_tokens(
    settings: Mapping[str, Any],
    special_map: Mapping[str, object] | None,
    added: Mapping[str, object] | None,
    present: Sequence[Mapping[str, object]],
) -> SpecialTokens:
    """Reads the tokens that the files name.

    Args:
      settings: content of `tokenizer_config.json`.
      special_map: content of `special_tokens_map.json`; None without that file.
      added: content of `added_tokens.json`: text -> id; None without that file.
      present: the added tokens of `tokenizer.json`.

    Raises:
      ValueError: an entry has no text, or an id is not an integer.
    """
    settings = dict(settings)
    if not isinstance(settings.get(EXTRA) or [], list | Mapping):
        raise ValueError(f"{EXTRA}={settings[EXTRA]!r} must be a list or an object")
    if not settings.get(EXTRA) and _OLD_EXTRA in settings:
        settings[EXTRA] = settings.pop(_OLD_EXTRA)
    role_names = [
        name for name in _role_names(settings) if isinstance(settings[name], str)
    ]
    _take_roles(settings, {name: settings.pop(name) for name in role_names})
    by_id: dict[int, AddedToken] = {}
    by_text: dict[str, AddedToken] = {}

    def note(name: Any, token: AddedToken) -> None:
        try:
            by_id[int(name)] = by_text[token.content] = token
        except (TypeError, ValueError):
            raise ValueError(f"token id {name!r} must be a whole number") from None

    # The tokenizer keeps these tokens, so the setting is not needed any more.
    listed = settings.pop("added_tokens_decoder", None)
    if listed is not None:
        if not isinstance(listed, Mapping):
            raise ValueError(f"added_tokens_decoder={listed!r} must be an object")
        for name, entry in listed.items():
            note(name, _token("added_tokens_decoder", entry))
    else:
        for key, value in (special_map or {}).items():
            settings[key] = _from_map(key, value, settings)
        _take_roles(settings, {})
        plain = [*map(settings.get, SPECIAL_TOKENS), *(settings.get(EXTRA) or [])]
        # Tokens that `tokenizer_config.json` writes with flags are excluded here.
        texts = {
            token_text(x)
            for x in plain
            if not isinstance(x, Mapping) or "__type" not in x
        }
        for text, name in (added or {}).items():
            is_special = text in texts
            flags = {"normalized": not is_special, "special": is_special}
            note(name, AddedToken(text, flags))
        for entry in present:
            note(entry.get("id"), _token("added_tokens", entry))
    if EXTRA not in settings and _OLD_EXTRA in settings:
        settings[EXTRA] = settings.pop(_OLD_EXTRA)
    tokens = [by_id[name] for name in sorted(by_id)]
    contents = {token.content for token in tokens}
    contents.update(str(entry.get("content")) for entry in present)
    entries = [*_entries(settings).items()]
    entries += [(EXTRA, entry) for entry in settings.get(EXTRA) or []]
    # A token may be written as a text and with flags: the library uses the later one.
    once: list[object] = []
    for name, entry in entries:
        if entry is not None and entry not in once:
            once.append(entry)
            more = _token(name, entry)
            if name in SPECIAL_TOKENS:
                # A token with the id of another one has left its flags here.
                more = by_text.get(more.content, more)
            tokens += [more] if more.content not in contents else []
    named = set(tokens_by_role(settings).values())
    tokens = [
        token._replace(flags={**token.flags, "special": True})
        if token.content in named
        else token
        for token in tokens
    ]
    return SpecialTokens(settings, tokens)


def tokens_by_role(settings: Mapping[str, object]) -> dict[str, str]:
    """Returns the texts of the tokens that have a role, such as `bos_token`."""
    texts = {name: token_text(value) for name, value in _entries(settings).items()}
    return {name: text for name, text in texts.items() if text is not None}


def token_text(token: object) -> str | None:
    """Returns a token's text from either of the two forms that files use."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _role_names(settings: Mapping[str, object]) -> list[str]:
    """Returns the names of roles that only some models have, such as `image_token`."""
    # Not every such name has a token: `add_bos_token` is a boolean.
    names = [name for name in settings if name.endswith("_token")]
    return [x for x in names if x not in SPECIAL_TOKENS and token_text(settings[x])]


def _entries(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokens that have a role, as the settings write them."""
    names = (*SPECIAL_TOKENS, *_role_names(settings))
    return {name: settings.get(name) for name in names} | (
        settings.get(_ROLE_FIELD) or {}
    )


def _take_roles(settings: dict[str, Any], roles: dict[str, Any]) -> None:
    """Moves roles, and extra tokens that have names, into a setting of their own."""
    extra = settings.get(EXTRA)
    roles |= settings.pop(EXTRA) if isinstance(extra, Mapping) else {}
    if roles:
        settings[_ROLE_FIELD] = (settings.get(_ROLE_FIELD) or {}) | roles


def _from_map(key: str, value: object, settings: Mapping[str, Any]) -> object:
    """Returns a setting of `special_tokens_map.json`, its tokens marked special."""
    if key != EXTRA:
        return {**value, "special": True} if isinstance(value, Mapping) else value
    if not isinstance(value, list):
        return value
    tokens = list(settings.get(EXTRA) or [])
    more = [{**x, "special": True} if isinstance(x, Mapping) else x for x in value]
    return tokens + [token for token in more if token not in tokens]


def _token(name: str, entry: Any) -> AddedToken:
    """Returns a token from a file: a text, which is special, or a text with flags."""
    text = token_text(entry)
    if text is None:
        raise ValueError(f"{name}={entry!r} must be a text, or an object with content")
    if isinstance(entry, str):
        return AddedToken(text, {"special": True})
    flags = {name: bool(entry[name]) for name in _TOKEN_FLAGS if name in entry}
    return AddedToken(text, flags)
