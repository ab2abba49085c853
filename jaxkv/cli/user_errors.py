"""Separates errors in the user's input from failures of the program."""

import dis
import errno
import re

_CODE_PACKAGES = ("jaxkv", "pallas_kernels", "scaling", "experiments", "__main__")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_SELF_PREFIX = re.compile(r"\bself\.(?=\w+(?:, self\.\w+)*=)")
"""Prefix that `f"{self.level=}"` puts before a field's name; a path may contain
`self.`, too."""


def error_line(error: object) -> str:
    """Returns an error as one line, with field names as the user knows them.

    The library formats fields as `f"{self.level=} must be ..."`; the prefix `self.` is
    removed.

    Args:
      error: exception or text.
    """
    if isinstance(error, OSError) and error.filename is not None:
        error = f"{error.filename}: cannot be used: {error.strerror}"
    return " ".join(_SELF_PREFIX.sub("", str(error)).split())


def is_user_error(error: BaseException) -> bool:
    """Returns True if an error reports invalid input in one line.

    Invalid input is a file that cannot be used, a full disk, or a ValueError from a
    `raise` statement of this project. A ValueError from Python or a library is a bug
    and keeps its traceback.

    Args:
      error: exception as caught, with its traceback.
    """
    if isinstance(error, OSError):
        return error.filename is not None or error.errno in _NO_ROOM
    if str(error) == "embedded null byte":  # raised for a path from JSON
        return True
    end = error.__traceback__
    if not isinstance(error, ValueError) or end is None:
        return False
    while end.tb_next:
        end = end.tb_next
    module = end.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    raised = end.tb_frame.f_code.co_code[end.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and module in _CODE_PACKAGES
