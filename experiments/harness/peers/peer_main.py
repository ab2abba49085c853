"""Runs a benchmark peer in the interpreter that has its libraries.

    python peer_main.py FILE CLASS ARGUMENT...

makes a peer, CLASS(ARGUMENT...) of FILE. It prints `{"version"}` on standard output
when the peer is ready, or `{"absent": reason}`. Then it answers every input line, a
JSON document, with the result of the peer's `answer` and `peak_bytes`, the peak memory
of the process.

This file imports only the standard library, and FILE only the peer's libraries and
modules of its own folder. Both also run in older Python versions.
"""

import importlib
import json
import os
import resource
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(file, kind, *words):
    """Answers questions until the input ends."""
    # Prints of libraries go to standard error, so standard output has only answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        peer = getattr(import_peer(Path(file).resolve()), kind)(*words)
    except (ImportError, OSError, ValueError) as error:  # OSError: a shared library
        send({"absent": " ".join(str(error).split())})
        return
    send({"version": peer.version})
    for line in sys.stdin:
        reset_peak()
        answer = peer.answer(json.loads(line))
        send({**answer, "peak_bytes": peak_bytes()})


def import_peer(file):
    """Imports a file under its module name, with access to its own folder only.

    Folders of the project contain modules with common names, and their parent may be a
    site-packages folder of another Python, so neither is searched for libraries.
    """
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]
    name = ".".join(file.parent.relative_to(HERE.parents[2]).parts)
    package = types.ModuleType(name)
    package.__path__ = [str(file.parent)]
    sys.modules[name] = package
    return importlib.import_module(name + "." + file.stem)


def reset_peak():
    """Resets the peak memory of the process, if the system supports it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes():
    """Returns the peak resident memory of this process."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
