"""Runs a benchmark's peer in the interpreter that has its libraries.

    python peer_main.py FILE CLASS WORD...

makes a peer, CLASS(WORD...) of FILE. On standard output it says `{"version"}` when the
peer is ready, or `{"absent": why}`; then it answers every line, a JSON document, with
what the peer's `answer` makes of it and `peak_bytes`, the peak memory of the process.

It stands on the standard library, and FILE on the peer's own libraries and the modules
beside it: nothing else of the project is imported. Older Pythons run them, too.
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
    """Answers until the input ends."""
    # What libraries print goes to standard error: the answers stand alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        peer = getattr(import_peer(Path(file).resolve()), kind)(*words)
    except (ImportError, OSError, ValueError) as error:  # OSError: a library of its own
        send({"absent": " ".join(str(error).split())})
        return
    send({"version": peer.version})
    for line in sys.stdin:
        reset_peak()
        answer = peer.answer(json.loads(line))
        send({**answer, "peak_bytes": peak_bytes()})


def import_peer(file):
    """Imports a file under its name in the project, and lets it find its neighbours.

    The folders of the project hold modules with common names, and their parent may be a
    folder of libraries for another Python: neither may be searched for anything else.
    """
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]
    name = ".".join(file.parent.relative_to(HERE.parent.parent).parts)
    package = types.ModuleType(name)
    package.__path__ = [str(file.parent)]
    sys.modules[name] = package
    return importlib.import_module(name + "." + file.stem)


def reset_peak():
    """Lets `peak_bytes` forget the past, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes():
    """Peak resident memory of this process."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
