"""What flags of several commands have in common."""

import tyro


def without(said: str, help: str | None = None) -> object:
    """Annotates a flag that need not be given, and whose default would tell nothing.

    Args:
      said: what holds without it.
      help: its text; that under the field by default.
    """
    return tyro.conf.arg(help=help, help_behavior_hint=f"(default: {said})")


MAX_SECONDS = (
    "Seconds of work after which it stops as after Ctrl-C; status 75 says that the "
    "same command goes on from there."
)
