"""What a sandbox is worth here, found out by attacking it: no level is claimed that was not proven at this start."""

import contextlib
import errno
import os
import socket
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from turnwise.ext.sandbox.attacks import ATTACKS, CHMOD, CREATE, TCP, UDP, WRITE, Attack
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.results import ExecutionStatus
from turnwise.ext.sandbox.session import Session
from turnwise.ext.sandbox.zygote_process import INSTALL_VISION, Refusal, environment

MARK = "open: "
"""What the value of a successful attack begins with."""


@dataclass(frozen=True, slots=True)
class AttackResult:
    """One attack and how it went: `AttackResult(attack, True, "PermissionError")`."""

    attack: Attack
    blocked: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What was proven, and what the kernel refused on the way."""

    level: SandboxLevel
    layers: tuple[str, ...]
    proofs: tuple[AttackResult, ...]
    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...] = ()
    """What is less than the level leads one to expect."""
    absent: tuple[str, ...] = ()
    """Packages of the extra `vision` that are not installed: most code does without them."""

    def failed(self, level: SandboxLevel) -> tuple[AttackResult, ...]:
        """Attacks that this level must stop and that came through."""
        return tuple(proof for proof in self.proofs if level.reaches(proof.attack.level) and not proof.blocked)

    def summary(self) -> str:
        """What everybody must see: the level, and what is less than it leads one to expect."""
        first = f"sandbox level {self.level.name}, proven by {len(self.proofs)} attacks: {', '.join(self.layers)}"
        return "\n".join([first, *(f"warning: {warning}" for warning in self.warnings)])

    def text(self) -> str:
        """The report for people: summary, every attack, and what was refused."""
        lines = [self.summary()]
        for proof in self.proofs:
            lines.append(f"  {'blocked' if proof.blocked else 'OPEN   '}  {proof.attack.name} ({proof.detail})")
        lines += [f"  refused: {refusal}; {remedy(refusal)}" for refusal in self.refusals]
        if self.absent:
            lines.append(f"  code about images cannot import {', '.join(self.absent)}: {INSTALL_VISION}")
        return "\n".join(lines)


def candidates(wanted: SandboxLevel, floor: SandboxLevel) -> list[SandboxLevel]:
    """Levels to try, the highest first. gVisor makes sessions ten times slower, so it is taken only when asked for."""
    if wanted is not SandboxLevel.auto:
        return [wanted]
    if floor is SandboxLevel.L4:
        return [floor]
    return [level for level in (SandboxLevel.L3, SandboxLevel.L2, SandboxLevel.L0) if level.reaches(floor)]


async def prove(
    session: Session,
    level: SandboxLevel,
    layers: tuple[str, ...],
    refusals: tuple[Refusal, ...],
    warnings: tuple[str, ...],
    limits: Limits,
) -> SandboxReport:
    """Attack from inside a fresh session; the level is the highest whose attacks all failed."""
    with bait_out() as bait:
        names = bait.names(limits)
        setting = "\n".join(f"{name} = {value!r}" for name, value in names.items())
        ready = await session.run(f"import fcntl, os, resource, socket, struct\n{setting}")
        if ready.status is not ExecutionStatus.OK:
            raise RuntimeError(f"the probe could not begin: {ready.text()}")
        proofs = [await _try(session, attack) for attack in ATTACKS]
        arrived = bait.arrived()
    proofs = [
        AttackResult(proof.attack, False, arrived[proof.attack.name]) if proof.attack.name in arrived else proof
        for proof in proofs
    ]
    return reached_by(SandboxReport(level, layers, tuple(proofs), refusals, warnings))


def reached_by(report: SandboxReport) -> SandboxReport:
    """The report with the highest level whose attacks all failed."""
    reached = SandboxLevel.L0
    for candidate in (SandboxLevel.L2, SandboxLevel.L3, SandboxLevel.L4):
        if report.level.reaches(candidate) and not report.failed(candidate):
            reached = candidate
    return replace(report, level=reached)


async def _try(session: Session, attack: Attack) -> AttackResult:
    body = textwrap.indent(attack.code.strip(), "    ")
    result = await session.run(
        f"def attack():\n{body}\nfound = attack()\n{MARK!r} + found if found is not None else 'no'"
    )
    if result.status is ExecutionStatus.OK and result.value is not None and result.value.strip("'\"").startswith(MARK):
        return AttackResult(attack, False, result.value.strip("'\"").removeprefix(MARK)[:80])
    if result.failure is not None:
        return AttackResult(attack, True, f"{result.failure.kind}: {result.failure.message}"[:80])
    if result.status is ExecutionStatus.OK:
        return AttackResult(attack, True, "to no effect")
    return AttackResult(attack, True, f"{result.status}: {'; '.join(result.notices)}"[:80])


@dataclass(frozen=True, slots=True)
class Bait:
    """What the attacks go for; the host looks at it afterwards."""

    folder: Path
    canary: Path
    tcp: socket.socket
    udp: socket.socket
    unix: str

    def names(self, limits: Limits) -> dict[str, object]:
        """The names and values that the attacks' code is given."""
        return {
            "CANARY": str(self.canary),
            "FOLDER": str(self.folder),
            "TCP": self.tcp.getsockname()[1],
            "UDP": self.udp.getsockname()[1],
            "UNIX": self.unix,
            "HOST": os.getpid(),
            "ENVIRONMENT": [*environment(), "TMPDIR", "LC_CTYPE"],
            "MEMORY": limits.memory + 1,
            "SCRATCH": limits.scratch,
            "KERNEL": os.uname().release,
        }

    def arrived(self) -> dict[str, str]:
        """By attack: what the host sees of it, whatever the session says."""
        effects = {}
        if self.canary.stat().st_mode & 0o777 != 0o666:
            effects[CHMOD] = "the mode changed"
        if self.canary.read_text() != "canary":
            effects[WRITE] = "the file changed"
        if (self.folder / "made").exists():
            effects[CREATE] = "the file is there"
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(16)
            effects[UDP] = "a packet arrived"
        with contextlib.suppress(BlockingIOError):
            self.tcp.accept()[0].close()
            effects[TCP] = "a connection arrived"
        return effects


@contextlib.contextmanager
def bait_out() -> Iterator[Bait]:
    """A file that everybody may read and write, and sockets that everybody may reach, while the probe runs."""
    unix = f"\0turnwise-probe-{os.urandom(8).hex()}"
    with tempfile.TemporaryDirectory(prefix="turnwise-probe-") as path, contextlib.ExitStack() as stack:
        folder = Path(path)
        folder.chmod(0o777)
        canary = folder / "canary"
        canary.write_text("canary")
        canary.chmod(0o666)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(unix)
        listener.listen()
        tcp.setblocking(False)
        udp.setblocking(False)
        yield Bait(folder, canary, tcp, udp, unix)


def remedy(refusal: Refusal) -> str:
    """What would make a refused layer available."""
    if refusal.layer == "namespaces" and refusal.errno in (errno.EPERM, errno.EACCES):
        return (
            "user namespaces are switched off here (a container's default seccomp profile, AppArmor on Ubuntu, or "
            "kernel.unprivileged_userns_clone=0); allow them, or accept sandbox.min_level=L2"
        )
    if refusal.layer == "namespaces" and refusal.errno in (errno.ENOSPC, errno.EUSERS):
        return "raise user.max_user_namespaces, or accept sandbox.min_level=L2"
    if refusal.layer == "gvisor":
        return "install gVisor's runsc where PATH finds it, and see that `runsc --rootless do true` works"
    if refusal.layer == "landlock":
        return "Landlock needs Linux 5.13 or newer with `landlock` among the LSMs (boot with lsm=landlock,...)"
    if refusal.layer == "seccomp":
        return "the kernel must allow seccomp filters (CONFIG_SECCOMP_FILTER), on x86_64 or aarch64"
    return "this layer needs a kernel or a container profile that allows it"


def explain(
    wanted: SandboxLevel, floor: SandboxLevel, refusals: tuple[Refusal, ...], report: SandboxReport | None
) -> str:
    """Why there is no sandbox: what was asked for, what is missing, what would help."""
    setting = f"sandbox.level={wanted.name}" if wanted is not SandboxLevel.auto else f"sandbox.min_level={floor.name}"
    lines = [f"{setting} is not available here, so no code was run"]
    lines += [f"  {refusal}; {remedy(refusal)}" for refusal in refusals]
    if report is not None:
        needed = floor if wanted is SandboxLevel.auto else wanted
        lines += [f"  not blocked: {proof.attack.name} ({proof.detail})" for proof in report.failed(needed)]
    return "\n".join(lines)
