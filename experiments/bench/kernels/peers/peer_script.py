"""Times attention of another framework. Run by an interpreter that has it.

    python kernel_peer_script.py NAME NUM_THREADS

On standard output it says `{"version"}` when it is ready, or `{"absent": why}`. Then it
answers every line, a shape as `kernel_peer_shapes` reads it with `num_turns`,
`num_calls` and `max_error` beside it, with `{"error", "timing", "plan_s", "how"}`, or
`{"refused": why}`. `error` is the norm of the difference to attention in float64, at
some rows, by the norm of that; what is not below `max_error` is not timed. `how` says
which of its ways was the fastest, and `plan_s` what that prepares once a step, by the
clock on the wall; null where there is nothing to prepare.

Of the project it imports only its neighbours `kernel_peer_*`, which stand on nothing
but the peer's own libraries. Older Pythons run them, too.
"""

import importlib
import json
import os
import sys
import types

PEERS = {
    "torch SDPA": ("kernel_peer_sdpa", "Sdpa"),
    "torch cuDNN": ("kernel_peer_sdpa", "CuDnn"),
    "FlexAttention": ("kernel_peer_flex", "Flex"),
    "FlexAttention paged": ("kernel_peer_flex", "FlexPaged"),
    "FlashInfer": ("kernel_peer_flashinfer", "FlashInfer"),
}
"""Module and class by name."""


def main(name, num_threads):
    """Answers until the input ends."""
    # What libraries print goes to standard error: the answers stand alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    module, kind = PEERS[name]
    try:
        module = importlib.import_module("experiments." + module)
        peer = getattr(module, kind)(int(num_threads))
    except (ImportError, OSError) as error:  # an OSError: a library of its own
        say({"absent": "not importable: " + " ".join(str(error).split())})
        return
    except ValueError as error:
        say({"absent": str(error)})
        return
    say({"version": peer.version})
    for line in sys.stdin:
        try:
            say(peer.answer(json.loads(line)))
        except Exception as error:  # of a library's, of a compiler's: it goes on
            said = " ".join(str(error).split())[:200]
            refusal = isinstance(error, ValueError)
            said = said if refusal else type(error).__name__ + ": " + said
            say({"refused": said})


def reach_neighbours():
    """Lets the modules of this folder be found, and no others that lie around here.

    The folder holds modules with common names, and its parent may be a folder of
    libraries for another Python: neither may be searched for anything else.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    package = types.ModuleType("experiments")
    package.__path__ = [here]
    sys.modules["experiments"] = package


if __name__ == "__main__":
    reach_neighbours()
    main(*sys.argv[1:])
