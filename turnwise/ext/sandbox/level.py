"""The levels of the sandbox: what keeps untrusted code in."""

import enum


class SandboxLevel(enum.Enum):
    """What keeps untrusted code in. Each level has the layers of those before it."""

    L0 = "L0"
    """Resource limits and a clean environment only. Not for code you do not trust."""
    L2 = "L2"
    """Landlock, a system call filter, no new privileges; works for ordinary users and in default containers."""
    L3 = "L3"
    """Also namespaces for users, processes, mounts, network and IPC: no /proc, a scratch folder with a quota."""
    L4 = "L4"
    """The whole sandbox inside gVisor, which answers system calls instead of the host's kernel."""
    auto = "auto"
    """The highest that can be proven here."""

    def reaches(self, other: "SandboxLevel") -> bool:
        """Whether this level is at least the other; `auto` is not a level that something can have."""
        order = (SandboxLevel.L0, SandboxLevel.L2, SandboxLevel.L3, SandboxLevel.L4)
        return order.index(self) >= order.index(other)
