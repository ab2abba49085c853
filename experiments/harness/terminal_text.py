"""A model's text before a person: no control characters, no more than fits."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def make_printable(text: str) -> str:
    """Replaces what could steer a terminal; new lines stay, tabs become spaces."""
    return "".join(
        char if char == "\n" or char.isprintable() else REPLACEMENT
        for char in text.expandtabs(4)
    )


def last_lines(text: str, *, num_lines: int, width: int) -> str:
    """Cuts a text to its end, as it fits on a screen.

    Args:
      text: any text.
      num_lines: lines to keep.
      width: characters to keep of each.
    """
    lines = make_printable(text).split("\n")[-num_lines:]
    return "\n".join(line[:width] for line in lines)
