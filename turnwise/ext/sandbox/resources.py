"""What all sessions together may take of this machine: descriptors and memory."""

import os

from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
from turnwise.system.resources import free_memory, raise_descriptors

SPARE_DESCRIPTORS = 128
"""For the rest of the program, and for images on their way into sessions."""
DESCRIPTORS_OF_A_SESSION = 2
"""Here: its socket and its process. The zygote has one of each session."""
MEMORY_SHARE = 0.75
"""Of the memory that was free at the start, for what sessions take beyond the packages."""


def most_sessions() -> int:
    """For how many sessions there are descriptors, once we have as many as we may."""
    limit = raise_descriptors()
    sessions = (limit - len(os.listdir("/proc/self/fd")) - SPARE_DESCRIPTORS) // DESCRIPTORS_OF_A_SESSION
    if sessions < 1:
        raise SandboxUnavailable(f"the sandbox needs more than the {limit} descriptors it may have: raise ulimit -Hn")
    return sessions


class Memory:
    """What sessions hold beyond what they were forked with, in bytes, together and one by one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[object, int] = {}
        self._total = 0

    def note(self, session: object, held: int) -> None:
        """What a session holds now; 0 when it has ended."""
        self._total += held - self._held.pop(session, 0)
        if held:
            self._held[session] = held

    def largest(self) -> object | None:
        """The session that must end, when they hold too much together."""
        return max(self._held, key=self._held.__getitem__) if self._total > self.most else None


def memory_for_sessions() -> int:
    """How many bytes of the memory that is free now sessions may take together."""
    return int(free_memory() * MEMORY_SHARE)
