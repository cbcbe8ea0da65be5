"""How torch's idle threads wait. It can be chosen only before torch is imported, so this file imports nothing of it.

torch's OpenMP lets a thread that has nothing to do spin for milliseconds. Beside other processes the spinning uses up
the thread's share of its core, and the next piece of work waits until it is scheduled again: training was seen to fall
to a fifth and less (`benchmarks/busy.py`). Threads that sleep are woken at once.
"""

import os
import sys
from pathlib import Path

VARIABLE, POLICY = "OMP_WAIT_POLICY", "passive"


def let_threads_sleep() -> None:
    """For this process and its children, unless the user has chosen, or torch is there already."""
    if "torch" not in sys.modules:
        os.environ.setdefault(VARIABLE, POLICY)


def is_command() -> bool:
    """Whether this process is the `subquad` command, by whatever name it was started."""
    words = sys.orig_argv
    as_module = "-m" in words and words[words.index("-m") + 1 :][:1] == ["subquad"]
    return as_module or Path(sys.argv[0]).stem == "subquad"


def policy() -> str:
    """In words, for `subquad doctor`."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None:
        return f"spin, which is slow beside other processes; {VARIABLE}={POLICY} lets them sleep"
    return f"{'sleep' if chosen.lower() == POLICY else 'spin'} ({VARIABLE}={chosen})"
