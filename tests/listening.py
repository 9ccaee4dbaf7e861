"""Which addresses the processes below one listen on, as the kernel tells."""

import ipaddress
import os
from pathlib import Path

LISTENS = "0A"


def below(roots: list[int]) -> list[int]:
    """Process ids of all children of these and theirs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - set(roots))


def of_session(session: int) -> list[int]:
    """Process ids of those that were started in a session, whoever is their parent now."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def listening(pids: list[int]) -> dict[str, list[str]]:
    """By the title of a process: the addresses that it listens on, as `127.0.0.1`."""
    sockets = {}
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                sockets[f"socket:[{fields[9]}]"] = _address(fields[1].partition(":")[0])
    found: dict[str, list[str]] = {}
    for pid in pids:
        try:
            held = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        for name in held:
            if name in sockets:
                found.setdefault(f"{title(pid)} {pid}", []).append(sockets[name])
    return found


def elsewhere(pids: list[int]) -> dict[str, list[str]]:
    """Who listens on anything but loopback."""
    every = {who: [one for one in places if not _is_loopback(one)] for who, places in listening(pids).items()}
    return {who: places for who, places in every.items() if places}


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _address(digits: str) -> str:
    """The kernel writes each four bytes in the order of this machine."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
