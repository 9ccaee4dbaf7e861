"""The process in which math-verify compares answers: JSON lines in, JSON lines out, killed by its own CPU clock.

Started by path from `math_boxed.py`, so it imports nothing of this package. An answer that a policy wrote can
be `10^{10^{10}}`: no exception and no thread can stop that, an interval timer whose signal ends the process can.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

MEMORY = 2 * 1024**3
"""Bytes of address space; more than that raises MemoryError here instead of filling the machine."""


def equal(golds: list[str], answer: str) -> bool:
    """Whether the answer means the same as one of the golds."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    # Their own time limits are alarms, which the timer below replaces.
    parsed = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    for gold in golds:
        wanted = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
        if verify(wanted, parsed, timeout_seconds=None):
            return True
    return False


def answer_to(request: dict[str, Any]) -> bool:
    """One comparison, under the clock."""
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # SIGPROF's default action: the process ends
    try:
        return equal(request["golds"], request["answer"])
    except (MemoryError, RecursionError):  # too much to compare; what is left of it is garbage
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Until standard input ends, which it does when the host does."""
    import math_verify  # noqa: F401  # before the limits and the clock

    logging.disable(logging.CRITICAL)  # they log answers they cannot read
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the host's to handle
    for line in sys.stdin:
        sys.stdout.write(json.dumps({"equal": answer_to(json.loads(line))}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
