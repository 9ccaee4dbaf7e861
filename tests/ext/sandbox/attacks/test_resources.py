"""Attacks 57-79: memory, time, output, and ends of the process, each beside a neighbour who must not notice."""

import asyncio
import time

import pytest

from turnwise.ext.sandbox.results import ExecutionStatus

MEMORY = {
    "57 bytearray": "bytearray(10 << 30)",
    "58 numpy": "import numpy; numpy.ones((40000, 40000))",
    "58 numpy in steps": "import numpy; held = []\nwhile True: held.append(numpy.ones(1 << 20))",
    "59 small ones": "held = []\nwhile True: held.append(bytes(1000))",
    "59 text": "text = 'x'\nwhile True: text += text",
    "60 map": "held = []\nwhile True: held.append(mmap.mmap(-1, 32 << 20)); held[-1].write(bytes(32 << 20))",
    "69 repr": "class R:\n    def __repr__(self): return 'x' * (10 << 30)\nR()",
    "77 image": "from PIL import Image; Image.new('RGB', (60000, 60000))",
    "78 zip bomb": "import zlib; packed = zlib.compress(bytes(16 << 20), 1); held = [zlib.decompress(packed) for _ in range(99)]",
}


@pytest.mark.any_level
@pytest.mark.parametrize("code", MEMORY.values(), ids=MEMORY)
def test_memory_ends_before_the_host_s_does(arena, code):
    """Told as such, and peak memory stays within the limit."""
    result = arena.run(code)
    assert result.status is ExecutionStatus.MEMORY or (
        result.failure and "Cannot allocate memory" in result.failure.message
    ), result
    assert result.peak_memory < arena.limits.memory + (128 << 20)


ENDLESS = {
    "61 loop": ("while True: pass", True),
    "62 swallowed": (
        "while True:\n    try:\n        while True: sum(range(9))\n    except BaseException: pass",
        None,
    ),  # between two tries it can be caught
    "62 in a finally": ("def f():\n    try: f()\n    finally: f()\nf()", None),
    "63 ignored": ("signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", False),
    "63 blocked": ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass", False),
    "63 handled": ("signal.signal(signal.SIGINT, lambda *_: None)\nwhile True: pass", False),
    "63 in C": ("libc.signal(2, 1)\nwhile True: pass", False),
    "64 pow": ("x = 7 ** (7 ** 9)", None),
    "64 regex": ("import re; re.match('(a+)+$', 'a' * 40 + 'b')", None),
    "64 sorting": ("import numpy\nwhile True: numpy.sort(numpy.random.rand(1 << 16))", True),
    "65 sleep": ("time.sleep(600)", True),
    "65 sleep in C": ("libc.usleep.argtypes = [ctypes.c_uint]\nwhile True: libc.usleep(10**8)", None),
    "65 stopped": ("os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass", None),
    "65 in a thread": ("t = threading.Thread(target=time.sleep, args=(600,)); t.start(); t.join()", True),
    "65 pipe": ("r, w = os.pipe(); os.read(r, 1)", True),
    "65 select": ("select.select([], [], [])", True),
    "70 the host's socket": ("os.read(3, 1)", True),
    "61 repr": ("class R:\n    def __repr__(self):\n        while True: pass\nR()", True),
    "61 exception": ("class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E()", None),
    "61 class": (
        "class M(type):\n    def __getattribute__(self, n):\n        while True: pass\nclass E(Exception, metaclass=M): pass\nraise E()",
        None,
    ),
    "88 __del__": ("class D:\n    def __del__(self):\n        while True: pass\nd = D(); del d", None),
}


@pytest.mark.any_level
@pytest.mark.parametrize("name", ENDLESS)
def test_time_runs_out(arena, name):
    """Interrupted with the variables kept where the code lets itself be interrupted, ended otherwise."""
    code, kept = ENDLESS[name]
    result = arena.run("value = 42", code, seconds=0.15)
    assert result.status is ExecutionStatus.TIMEOUT, result
    assert kept is None or result.kept is kept, result
    assert result.seconds < 5 and "stopped after 0.15 s" in result.text()


def test_memory_time_and_output_end_at_every_level(arena):
    """57, 61, 63, 67, 73: one of each kind; what follows from the limits of a process is tried at one level."""
    expected = {
        MEMORY["60 map"]: ExecutionStatus.MEMORY,
        ENDLESS["61 loop"][0]: ExecutionStatus.TIMEOUT,
        ENDLESS["63 ignored"][0]: ExecutionStatus.TIMEOUT,
        FLOODS["67 stderr"]: ExecutionStatus.OK,
        ENDS["73 _exit"][0]: ExecutionStatus.KILLED,
    }
    for code, status in expected.items():
        result = arena.run(code, seconds=0.15 if status is ExecutionStatus.TIMEOUT else None)
        assert result.status is status, (code, result)
        assert len(result.text()) < 4 * arena.limits.output + 20_000


def test_a_stopped_call_keeps_variables_and_an_ended_one_says_what_was_lost(arena):
    assert arena.run("value = 42", "while True: pass", "value", seconds=0.1).value == "42"
    result = arena.run(
        "value = 42", "signal.signal(2, signal.SIG_IGN)\nwhile True: pass", "'value' in globals()", seconds=0.1
    )
    assert result.value == "False"


FLOODS = {
    "66 endless print": "while True: print('x' * 1000)",
    "67 200 MB": "print('x' * (200 << 20))",
    "67 one by one": "for _ in range(50_000): print('y')",
    "67 stderr": "sys.stderr.write('e' * (50 << 20))",
    "68 raw descriptor": "for _ in range(500): os.write(1, b'z' * 60000)",
    "68 raw descriptor, errors": "for _ in range(500): os.write(2, b'z' * 60000)",
    "68 in C": "for _ in range(20000): libc.puts(b'c' * 999)",
    "69 long repr": "'r' * (50 << 20)",
    "69 long exception": "raise ValueError('v' * (50 << 20))",
    "69 many notices": "class E(Exception): pass\ne = E()\nfor _ in range(1000): e.add_note('n' * 10000)\nraise e",
    "69 long name": "raise type('N' * (1 << 20), (Exception,), {})()",
    "69 long line": "x = 1  # " + "l" * 500_000 + "\n1 / 0  # " + "l" * 400_000,
    "69 chain": "e = None\nfor _ in range(5000):\n    f = ValueError('x'); f.__cause__ = e; e = f\nraise e",
}


@pytest.mark.any_level
@pytest.mark.parametrize("code", FLOODS.values(), ids=FLOODS)
def test_floods_are_cut(arena, code):
    result = arena.run(code, seconds=0.7)
    assert result.status in (
        ExecutionStatus.OK,
        ExecutionStatus.TIMEOUT,
        ExecutionStatus.ERROR,
        ExecutionStatus.MEMORY,
        ExecutionStatus.DENIED,
    ), result
    assert len(result.text()) < 4 * arena.limits.output + 20_000
    assert result.peak_memory < arena.limits.memory + (128 << 20)


def test_there_is_no_input(arena):
    """70."""
    assert arena.run("input()").failure.kind == "EOFError"
    assert arena.run("sys.stdin.read(), os.read(0, 9)").value == "('', b'')"


SIGNALLED = (ExecutionStatus.KILLED, ExecutionStatus.OK)
"""The first process of a namespace does not get the signals that it sends to itself."""
REFUSED = (ExecutionStatus.ERROR, ExecutionStatus.MEMORY, ExecutionStatus.KILLED)
"""How deep is too deep, and what becomes of it, is for each version of Python to say; that it is, is not."""
ENDS = {
    "71 recursion": (
        "sys.setrecursionlimit(10**9)\nclass R:\n    def __repr__(self): return repr(self)\nrepr(R())",
        ExecutionStatus.KILLED,
    ),
    "71 within the limit": ("def f(): f()\nf()", ExecutionStatus.ERROR),
    "72 segfault": ("ctypes.string_at(0)", ExecutionStatus.KILLED),
    "72 illegal instruction": (
        "room = mmap.mmap(-1, 4096, prot=7); room.write(bytes([0x0f, 0x0b, 0, 0]))\n"
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(room)))()",
        ExecutionStatus.KILLED,
    ),
    "73 _exit": ("os._exit(0)", ExecutionStatus.KILLED),
    "73 _exit 97": ("os._exit(97)", ExecutionStatus.KILLED),
    "73 exit of the C library": ("libc.exit(0)", ExecutionStatus.KILLED),
    "74 sys.exit": ("sys.exit()", ExecutionStatus.OK),
    "74 sys.exit 3": ("sys.exit(3)", ExecutionStatus.ERROR),
    "74 in a thread": ("t = threading.Thread(target=sys.exit); t.start(); t.join()", ExecutionStatus.OK),
    "75 abort": ("os.abort()", ExecutionStatus.KILLED),
    "75 raise": ("signal.raise_signal(signal.SIGKILL); time.sleep(0.01)", SIGNALLED),
    "75 alarm": ("signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1)", SIGNALLED),
    "76 brackets": ("eval('(' * 5000 + ')' * 5000)", ExecutionStatus.ERROR),
    "76 nesting": ("eval('-' * 100_000 + '1')", REFUSED),
    "76 ast": (
        "import ast\nn = ast.Constant(1)\nfor _ in range(100_000): n = ast.UnaryOp(ast.USub(), n)\ncompile(ast.Expression(n), '', 'eval')",
        REFUSED,
    ),
    "76 nothing but syntax": ("(" * 300 + ")" * 300, REFUSED),
    "76 NUL": ("x = '\0'", ExecutionStatus.ERROR),
    "76 too long": ("#" * (1 << 20) + "#", ExecutionStatus.ERROR),
    "78 decompression bomb": (
        "import io, zlib, struct\nfrom PIL import Image\n"
        "def chunk(k, d): return struct.pack('>I', len(d)) + k + d + struct.pack('>I', zlib.crc32(k + d))\n"
        "open('bomb.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 50000, 50000, 8, 2, 0, 0, 0))"
        " + chunk(b'IDAT', zlib.compress(bytes(1 << 20))) + chunk(b'IEND', b''))",
        ExecutionStatus.OK,
    ),
}


@pytest.mark.any_level
@pytest.mark.parametrize("name", ENDS)
def test_ends(arena, name):
    """71-78: whatever becomes of the process, the host tells it as it was and goes on."""
    code, expected = ENDS[name]
    result = arena.run(code)
    assert result.status in (expected if isinstance(expected, tuple) else (expected,)), result
    assert result.images == ()
    if result.status is ExecutionStatus.KILLED:
        assert not result.kept and "lost" in result.text()


def test_no_image_is_larger_than_allowed(arena):
    """77."""
    result = arena.run(
        "from PIL import Image; show(Image.new('L', (3000, 3000))); show(*[Image.new('L', (9, 9), n) for n in range(9)])"
    )
    assert result.status is ExecutionStatus.OK and len(result.images) <= arena.limits.images
    assert (
        sum(one.size[0] * one.size[1] for one in result.images) <= arena.limits.pixels and "left out" in result.text()
    )


SPIN = """
import hashlib
steps = [0]
def spin():
    while True:
        hashlib.sha256(bytes(4096)).digest()
        steps[0] += 1
threading.Thread(target=spin, daemon=True).start()
time.sleep(0.02)
steps[0]
"""


def test_threads_left_behind_get_no_time_between_calls(arena):
    """79: the count when the next call begins is what it was when the last one ended, give or take the moments between."""

    async def work() -> tuple[int, int, int]:
        async with arena.pool.session() as session:
            await session.run(arena.prelude({}))
            first = int((await session.run(SPIN)).value or 0)
            processor = await processor_time(arena)
            await asyncio.sleep(0.4)
            used = await processor_time(arena) - processor
            second = int((await session.run("steps[0]")).value or 0)
            return first, second, used

    first, second, used = arena.do(work())
    assert 0 < first <= second
    assert used <= 2, "clock ticks of 10 ms in 400 ms"


async def processor_time(arena) -> int:
    """Clock ticks used by all processes of the pool."""
    total = 0
    for pid in arena.processes():
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


def test_the_neighbour_runs_while_others_misbehave(arena):
    """61-68 at once: right results, and none of them waits for the attackers' ends."""

    async def work() -> list[str | None]:
        bad = [arena.pool.session() for _ in range(4)]
        codes = (
            "while True: pass",
            "while True: print('x' * 1000)",
            "held = []\nwhile True: held.append(bytearray(1 << 20))",
            "import os; os._exit(1)",
        )
        attacks = [asyncio.ensure_future(one.run(code, 1)) for one, code in zip(bad, codes, strict=True)]
        good = arena.pool.session(seed=3)
        found = [(await good.run(f"sum(range({n}))")).value for n in range(20)]
        began = time.monotonic()
        statuses = [(await one).status for one in attacks]
        assert (
            statuses[0] is ExecutionStatus.TIMEOUT
            and statuses[3] is ExecutionStatus.KILLED
            and time.monotonic() - began < 20
        )
        for one in (*bad, good):
            await one.close()
        return found

    assert arena.do(work()) == [str(sum(range(n))) for n in range(20)]
