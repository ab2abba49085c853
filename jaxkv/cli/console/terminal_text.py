"""Text of a model on a terminal: printable characters, cut to the screen."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def make_printable(text: str) -> str:
    """Replaces control characters; new lines remain, tabs become spaces."""
    return "".join(
        char if char == "\n" or char.isprintable() else REPLACEMENT
        for char in text.expandtabs(4)
    )


def last_lines(text: str, *, num_lines: int, width: int) -> str:
    """Returns the last lines of a text, cut to a width.

    Args:
      text: any text.
      num_lines: number of lines.
      width: characters per line.
    """
    lines = make_printable(text).split("\n")[-num_lines:]
    return "\n".join(line[:width] for line in lines)
