"""What the probe tries at every start. Each is the body of a function that returns how far it came, or raises.

The names in capitals are set beforehand: the bait, the host's pid, the limits.
"""

from dataclasses import dataclass

from turnwise.ext.sandbox.level import SandboxLevel


@dataclass(frozen=True, slots=True)
class Attack:
    """Code, and the level from which on it must fail. Returning None means that it failed."""

    name: str
    level: SandboxLevel
    code: str


CHMOD = "change the mode of a file outside"
WRITE = "write to a file outside"
CREATE = "make a file outside"
TCP = "connect over TCP"
UDP = "send over UDP"

_FORK = """
child = os.fork()
if child == 0:
    os._exit(0)
return "forked"
"""
_ENVIRONMENT = """
extra = set(os.environ) - set(ENVIRONMENT)
return f"sees {sorted(extra)}" if extra else None
"""
_DESCRIPTORS = """
output = os.fstat(1)  # a memory file of its own, which the session may hold twice
for number in range(4, 128):
    try:
        found = os.fstat(number)
    except OSError:
        continue
    if (found.st_dev, found.st_ino) != (output.st_dev, output.st_ino):
        return f"has descriptor {number}"
"""
_PROCESSES = """
return None if os.getpid() == 1 and not os.path.exists("/proc/self") else f"pid {os.getpid()}"
"""
_LOCK = """
with open(os.__file__) as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
return "locked a file that all sessions and the host share"
"""
_PEER = """
return str(struct.unpack("iii", socket.socket(fileno=os.dup(3)).getsockopt(socket.SOL_SOCKET, 17, 12)))
"""
_NAME = """
name = os.uname().nodename
return None if name == "sandbox" else name
"""
_FILL = """
try:
    for name in ("a", "b"):
        with open(name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, SCRATCH * 3 // 5)
finally:
    for name in ("a", "b"):
        if os.path.exists(name):
            os.unlink(name)
return "wrote more than the quota"
"""

ATTACKS = (
    Attack("take more memory than allowed", SandboxLevel.L0, "return str(len(bytearray(MEMORY)))"),
    Attack("see the host's environment", SandboxLevel.L0, _ENVIRONMENT),
    Attack("use the host's descriptors", SandboxLevel.L0, _DESCRIPTORS),
    Attack("read a file outside", SandboxLevel.L2, "return open(CANARY).read()"),
    Attack("list a folder outside", SandboxLevel.L2, "return str(os.listdir(FOLDER))"),
    Attack(WRITE, SandboxLevel.L2, "open(CANARY, 'a').write('x'); return 'written'"),
    Attack("truncate a file outside", SandboxLevel.L2, "os.truncate(CANARY, 0); return 'truncated'"),
    Attack(CREATE, SandboxLevel.L2, "open(FOLDER + '/made', 'w'); return 'made'"),
    Attack(CHMOD, SandboxLevel.L2, "os.chmod(CANARY, 0o777); return None"),  # the host looks
    Attack(TCP, SandboxLevel.L2, "socket.create_connection(('127.0.0.1', TCP), 1); return 'connected'"),
    Attack(UDP, SandboxLevel.L2, "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP)); return ''"),
    Attack("connect to a unix socket", SandboxLevel.L2, "socket.socket(socket.AF_UNIX).connect(UNIX); return ''"),
    Attack("start a process", SandboxLevel.L2, _FORK),
    Attack("run a program", SandboxLevel.L2, "os.execv('/bin/true', ['true'])"),
    Attack("signal the host", SandboxLevel.L2, "os.kill(HOST, 0); return 'signalled'"),
    Attack("signal its process group", SandboxLevel.L2, "os.kill(0, 0); return 'signalled'"),
    Attack("read the host's environment", SandboxLevel.L2, "return open(f'/proc/{HOST}/environ').read()"),
    Attack("change its limits", SandboxLevel.L2, "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); return 'changed'"),
    Attack("lock a file of Python's", SandboxLevel.L2, _LOCK),
    Attack("learn who is at the other end of its socket", SandboxLevel.L2, _PEER),
    Attack("learn that a file outside exists", SandboxLevel.L3, "return str(os.stat(CANARY).st_size)"),
    Attack("see other processes", SandboxLevel.L3, _PROCESSES),
    Attack("learn the host's name", SandboxLevel.L3, _NAME),
    Attack("fill the disk", SandboxLevel.L3, _FILL),
    Attack("talk to the host's kernel", SandboxLevel.L4, "return KERNEL if os.uname().release == KERNEL else None"),
)
