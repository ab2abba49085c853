"""Tells input that was refused in so many words from a failure of ours."""

import dis
import errno

_PACKAGES = ("jaxkv", "pallas_kernels", "scaling", "experiments", "__main__")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_refusal(error: BaseException) -> bool:
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


def line(error: BaseException) -> str:
    """Says what a refusal is about: of a file, its name first."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: cannot be used: {error.strerror}"
    return str(error)
