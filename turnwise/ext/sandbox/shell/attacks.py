"""What the probe tries in a shell session: Python's attacks, less what a shell may do, and what only a shell can."""

import json
import textwrap

from turnwise.ext.sandbox.attacks import ATTACKS, Attack
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.probe import AttackResult, bait_out
from turnwise.ext.sandbox.shell.session import ENVIRONMENT, PLACES, ShellSession
from turnwise.ext.sandbox.zygote_process import SandboxLost

ALLOWED_HERE = {
    "start a process",
    "run a program",
    "signal its process group",
    "see other processes",
    "use the host's descriptors",
    "learn who is at the other end of its socket",
    "lock a file of Python's",
    "talk to the host's kernel",
}
"""Of Python's attacks those that a shell may do, or that have a counterpart of its own here."""
_FORKS = """
children = []
try:
    for _ in range(PROCESSES + 8):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
return f"has {len(children)} processes"
"""
_CHANNEL = """
for number in range(3, 64):
    try:
        found = os.fstat(number)
    except OSError:
        continue
    return f"has descriptor {number}"
"""
_CALL = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); found = "
_CHECK = "\nif found < 0:\n    raise OSError(ctypes.get_errno(), 'refused')\nreturn "
_OTHERS = "return None if os.getpid() < 4096 and not os.path.exists('/proc/self') else f'pid {os.getpid()}'"
_MORE_MEMORY = "return str(len(bytearray(MEMORY + (1 << 30))))"
IN_ONE_PROCESS = (
    *(attack for attack in ATTACKS if attack.name not in ALLOWED_HERE and attack.level is not SandboxLevel.L0),
    next(attack for attack in ATTACKS if attack.name == "see the host's environment"),
    Attack("take more memory than allowed", SandboxLevel.L0, _MORE_MEMORY),
    Attack("start more processes than allowed", SandboxLevel.L3, _FORKS),
    Attack("use the session's socket", SandboxLevel.L2, _CHANNEL),
    Attack("see other processes", SandboxLevel.L3, _OTHERS),
    Attack("make a user namespace", SandboxLevel.L2, f"{_CALL}libc.unshare(0x10000000){_CHECK}'made'"),
    Attack("trace the first process", SandboxLevel.L2, f"{_CALL}libc.ptrace(16, 1, 0, 0){_CHECK}'attached'"),
    Attack(
        "mount a file system", SandboxLevel.L2, f"{_CALL}libc.mount(b'x', b'.', b'tmpfs', 0, None){_CHECK}'mounted'"
    ),
)
END_THE_FIRST = Attack(
    "end the session's first process", SandboxLevel.L3, "kill -9 1; kill -USR2 1; kill -INT 1; kill 1"
)
OUTLIVE = Attack("outlive the command", SandboxLevel.L3, "setsid sleep 60 < /dev/null > /dev/null 2>&1 & echo $! > pid")
OUTLAST = Attack(
    "outlast the time limit", SandboxLevel.L3, "trap '' INT TERM HUP; (while :; do :; done) & while :; do :; done"
)
TOGETHER = Attack(
    "take more memory in several processes",
    SandboxLevel.L3,
    "for i in 1 2 3 4; do python -I -c 'import time; held = bytearray(MEMORY * 2 // 5); held[::4096] = "
    'b"x" * len(held[::4096]); time.sleep(30)\' & done; wait; echo open',
)
_SCRIPT = """
import fcntl, json, os, resource, signal, socket, struct, sys, time
{names}
{attacks}
for name, attack in ATTACKS:
    try:
        found = attack()
        line = [name, found is None, found or "to no effect"]
    except BaseException as error:
        line = [name, True, f"{{type(error).__name__}}: {{error}}"]
    print("proof", json.dumps(line), flush=True)
"""


async def attack_shell(session: ShellSession, limits: Limits, processes: int) -> list[AttackResult]:
    """How each of them went, in one session."""
    proofs = await _in_one_process(session, limits, processes)
    await session.run(END_THE_FIRST.code)
    alive = await session.run("echo alive")
    proofs.append(AttackResult(END_THE_FIRST, alive.output.strip() == "alive", alive.output[:80]))
    await session.run(OUTLIVE.code)
    left = await session.run("kill -0 $(cat pid) 2> /dev/null && echo open")
    proofs.append(AttackResult(OUTLIVE, "open" not in left.output and left.exit is not None, f"exit {left.exit}"))
    late = await session.run(OUTLAST.code, seconds=0.2)
    proofs.append(AttackResult(OUTLAST, late.stopped is not None, late.stopped or "it came to its end"))
    much = await session.run(TOGETHER.code.replace("MEMORY", str(limits.memory)), seconds=20)
    proofs.append(
        AttackResult(TOGETHER, much.stopped is not None and "memory" in much.stopped, much.stopped or much.output[:80])
    )
    return proofs


async def _in_one_process(session: ShellSession, limits: Limits, processes: int) -> list[AttackResult]:
    with bait_out() as bait:
        names = bait.names(limits) | {"ENVIRONMENT": [*ENVIRONMENT, *PLACES, "LC_CTYPE", "PWD"], "PROCESSES": processes}
        bodies = "\n".join(
            f"def attack_{number}():\n{textwrap.indent(attack.code.strip(), '    ')}"
            for number, attack in enumerate(IN_ONE_PROCESS)
        )
        listed = ", ".join(f"({attack.name!r}, attack_{number})" for number, attack in enumerate(IN_ONE_PROCESS))
        setting = "\n".join(f"{name} = {value!r}" for name, value in names.items())
        script = _SCRIPT.format(names=setting, attacks=f"{bodies}\nATTACKS = [{listed}]")
        ran = await session.run(argv=("python", "-I", "-B", "-"), stdin=script.encode(), seconds=60)
        arrived = bait.arrived()
    verdicts = {}
    for line in ran.output.splitlines():
        if line.startswith("proof "):
            name, blocked, detail = json.loads(line.removeprefix("proof "))
            verdicts[name] = (blocked, detail[:80])
    if len(verdicts) != len(IN_ONE_PROCESS):
        raise SandboxLost(f"the probe of the shell did not come to its end: exit {ran.exit}, {ran.output[-400:]!r}")
    return [
        AttackResult(attack, False, arrived[attack.name])
        if attack.name in arrived
        else AttackResult(attack, *verdicts[attack.name])
        for attack in IN_ONE_PROCESS
    ]
