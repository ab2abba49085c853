"""Tells input that was refused in so many words from a failure of ours."""

import dis
import errno
import re

_PACKAGES = ("jaxkv", "pallas_kernels", "scaling", "experiments", "__main__")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_OWN = re.compile(r"\bself\.(?=\w+(?:, self\.\w+)*=)")
"""What `f"{self.level=}"` puts before a field's name; a path may hold `self.`, too."""


def one_line(what: object) -> str:
    """Puts an error into one line, with fields called as whoever set them knows them.

    In the library `f"{self.level=} must be ..."` names the expression; on the command
    line there is no `self`.

    Args:
      what: the error, or a text.
    """
    if isinstance(what, OSError) and what.filename is not None:
        what = f"{what.filename}: cannot be used: {what.strerror}"
    return " ".join(_OWN.sub("", str(what)).split())


def is_user_error(error: BaseException) -> bool:
    """Tells whether an error says what is wrong with the input, in a line.

    A refusal is a file that cannot be used, a full disk, or a ValueError that one of
    our own `raise` statements made. One that Python or a library made is a mistake of
    ours, and deserves its traceback.

    Args:
      error: as it was caught, with its traceback.
    """
    if isinstance(error, OSError):
        return error.filename is not None or error.errno in _NO_ROOM
    if str(error) == "embedded null byte":  # a path's, from JSON
        return True
    end = error.__traceback__
    if not isinstance(error, ValueError) or end is None:
        return False
    while end.tb_next:
        end = end.tb_next
    module = end.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    raised = end.tb_frame.f_code.co_code[end.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and module in _PACKAGES
