"""Attacks 80-91 and 97: a session that writes the answers itself, breaks the harness around it, or answers out of turn.

What the host makes of every kind of forged bytes is in tests/ext/sandbox/test_replies.py; here a session writes some of them.
"""

import asyncio
import threading

import pytest

from turnwise.ext.sandbox import session as sessions
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.replies import caps_of
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage, Result

HANG = "\nwhile True: time.sleep(1)"
FORGED = {
    "80 garbage": "os.write(3, os.urandom(99))",
    "80 another question": "forge({'id': 7, 'status': 'ok'})",
    "80 status of the host": "forge({'id': 2, 'status': 'killed'})",
    "81 oversize": "forge(b'', total=FRAME + 1, length=0)",
    "81 blobs without end": "forge(b'{}', bytes(FRAME - 2))",
    "82 deep": "forge(b'[' * 100000 + b']' * 100000)",
    "85 image": "forge({'id': 2, 'status': 'ok', 'images': [{'name': 'a', 'mode': 'L', 'size': [2, 2], 'length': 4}]}, b'x')",
}


def run_all(arena, codes: dict[str, str], seconds: float) -> dict[str, Result]:
    """Each in a session of its own, several at a time, because the host waits a moment for each to end by itself."""

    async def one(code: str) -> Result:
        async with arena.pool.session() as session:
            caps = caps_of(arena.limits)
            await session.run(arena.prelude({"HEADER": caps.header, "FRAME": caps.frame}))
            return await session.run(code, seconds)

    async def work() -> list[Result]:
        return await asyncio.gather(*map(one, codes.values()))

    return dict(zip(codes, arena.do(work()), strict=True))


def test_a_forged_answer_ends_the_session_and_nothing_else(arena):
    for name, result in run_all(arena, {name: code + HANG for name, code in FORGED.items()}, 5).items():
        assert result.status is ExecutionStatus.KILLED and not result.kept, (name, result)
        assert result.stdout == result.stderr == "" and result.value is None and result.images == (), name


BROKEN_OFF = {
    "83 half a prefix": "os.write(3, b'\\0\\0')" + HANG,
    "83 half a frame": "os.write(3, struct.pack('!II', 100, 100) + b'{\"id\"')" + HANG,
    "83 drop by drop": "os.write(3, struct.pack('!II', 10**6, 10**6))\nwhile True: os.write(3, b' '); time.sleep(0.001)",
    "83 half a frame and exit": "os.write(3, struct.pack('!II', 100, 100)); os._exit(0)",
    "84 close": "os.close(3)" + HANG,
    "84 close all": "os.closerange(0, 128)" + HANG,
    "84 shut down": "socket.socket(fileno=3).shutdown(socket.SHUT_RDWR)" + HANG,
    "84 shut down reading": "s = socket.socket(fileno=3); s.shutdown(socket.SHUT_RD)" + HANG,
    "84 replace": "os.dup2(1, 3)" + HANG,
    "84 replace by a file": "os.dup2(os.open('a', os.O_CREAT | os.O_RDWR), 3)" + HANG,
    "84 swallow what is sent": "os.set_blocking(3, False)\nwhile True:\n    try: os.read(3, 99)\n    except OSError: time.sleep(0.01)",
    "84 close and go on": "os.close(3)",
    "84 buffers of nothing": "s = socket.socket(fileno=os.dup(3)); s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)"
    + HANG,
}


def test_a_broken_line_ends_the_session_and_nothing_else(arena):
    for name, result in run_all(arena, BROKEN_OFF, 0.5).items():
        assert result.status in (ExecutionStatus.KILLED, ExecutionStatus.TIMEOUT), (name, result)
        assert result.images == () and result.value is None, name


HARNESS = {
    "86 json": "import json; json.dumps = json.loads = None; json.JSONEncoder.encode = None; json.encoder.c_make_encoder = None",
    "86 builtins": "import builtins\nfor name in ('exec', 'eval', 'compile', 'len', 'isinstance', 'str', 'repr', 'print'): setattr(builtins, name, None)",
    "86 streams": "sys.stdout = sys.stderr = sys.__stdout__ = None",
    "86 os": "os.read = os.write = os.close = os.fstat = os.lseek = None",
    "86 socket": "socket.socket.sendall = socket.socket.recv = None; socket.socket = None",
    "86 struct": "struct.Struct = struct.pack = struct.unpack = None",
    "86 ast and linecache": "import ast, linecache; ast.parse = ast.Expr = None; linecache.cache = None; linecache.getline = None",
    "86 modules": "sys.modules.clear()",
    "86 main": "sys.modules['__main__'] = None",
    "86 trace": "sys.settrace(lambda *_: 1 / 0); sys.setprofile(lambda *_: 1 / 0)",
    "86 recursion limit": "sys.setrecursionlimit(60)",
    "86 garbage collection": "import gc; gc.callbacks.append(lambda *_: 1 / 0); gc.set_threshold(1)",
    "86 hooks": "sys.excepthook = sys.unraisablehook = sys.displayhook = None; threading.excepthook = None",
    "86 import": "import builtins; builtins.__import__ = None; sys.meta_path.clear(); sys.path_hooks.clear()",
    "86 warnings": "import warnings; warnings.simplefilter('error')",
    "86 audit": "sys.addaudithook(lambda *_: time.sleep(0))",
    "86 show": "show = None; import turnwise.ext.sandbox.inside.images as i; i.Gallery.collect = i.Gallery.summary = None",
    "86 worker": "w = sys.modules['turnwise.ext.sandbox.inside.worker']; w.Session.answer = w.Session.reply = w.Channel.write = None",
    "86 frames": "f = sys._getframe()\nwhile f: g = f; f = f.f_back; g.f_globals.clear()",
    "86 interval": "sys.setswitchinterval(1e9)",
    "88 atexit": "import atexit; atexit.register(lambda: time.sleep(60))",
    "88 __del__": "class D:\n    def __del__(self): time.sleep(60)\nkeep = D()",
    "86 folder gone": "os.chdir('/'); import shutil; shutil.rmtree(os.environ.get('TMPDIR', '/scratch'), ignore_errors=True)",
}


@pytest.mark.any_level
@pytest.mark.parametrize("code", HARNESS.values(), ids=HARNESS)
def test_a_broken_harness_is_the_session_s_own_loss(arena, code):
    """It may go on or be ended; what it answers is an answer, and the host lives."""
    result = arena.run(code, "1 + 1", seconds=1)
    assert result.value == "2" or result.status in (
        ExecutionStatus.KILLED,
        ExecutionStatus.ERROR,
        ExecutionStatus.TIMEOUT,
    ), result


def test_a_harness_broken_at_another_level_is_that_session_s_loss(arena):
    """86: the same at every level, so that two of them are enough for the others."""
    for name in ("86 worker", "86 os"):
        result = arena.run(HARNESS[name], "1 + 1", seconds=1)
        assert result.value == "2" or result.status in (
            ExecutionStatus.KILLED,
            ExecutionStatus.ERROR,
            ExecutionStatus.TIMEOUT,
        ), (name, result)


def test_a_session_that_reads_nothing_more_does_not_hold_the_host(arena):
    """83: it answers in the worker's place, and the next request does not fit into the socket."""

    async def work():
        async with arena.pool.session() as session:
            await session.run(arena.prelude({}))
            result = await session.run("forge({'id': 2, 'status': 'ok'})" + HANG)
            assert result.status is ExecutionStatus.OK
            return await session.run("#" * 1_000_000, 0.2)

    assert arena.do(work(), limit=2).status in (ExecutionStatus.TIMEOUT, ExecutionStatus.KILLED)


LEFT_BEHIND = """
def answer():
    os.set_blocking(3, True)
    while True:
        select.select([3], [], [])
        forge({'id': 3, 'status': 'ok', 'value': 'forged'})
        time.sleep(60)
threading.Thread(target=answer, daemon=True).start()
"""


def test_an_answer_from_a_thread_left_behind(arena):
    """97: it speaks for its own session only, and the first answer out of turn ends it."""
    result = arena.run(LEFT_BEHIND, "1 + 1", "2 + 2", seconds=1)
    assert result.value == "4" or result.status is ExecutionStatus.KILLED, result


def test_words_between_calls_end_the_session(arena):
    """80."""

    async def work():
        async with arena.pool.session() as session:
            await session.run(arena.prelude({}))
            await session.run(
                "threading.Timer(0.0, lambda: forge({'id': 3, 'status': 'ok', 'value': 'early'})).start(); time.sleep(0)"
            )
            return await session.run("time.sleep(0.2); 'honest'", 1)

    result = arena.do(work())
    if result.status is ExecutionStatus.OK:
        assert result.value in ("'honest'", "early"), result  # a session may lie about itself
    else:
        assert result.status in (ExecutionStatus.KILLED, ExecutionStatus.ERROR) and result.value is None, result


TEXTS = {
    "91 surrogates": "print('\\ud800 \\udfff'); '\\ud800'",
    "91 in an exception": "raise ValueError('\\ud800\\0')",
    "91 in a name": "raise type('\\ud800', (Exception,), {})('\\udc00')",
    "91 NUL": "print('a\\0b'); sys.stdout.buffer.write(b'\\0\\xff'); os.write(1, b'\\0\\xfe')",
    "91 forged": 'forge(b\'{"id": 2, "status": "ok", "stdout": "\\\\ud800\\\\u0000", "value": "\\\\udc00", "notices": ["\\\\ud800\\\\u0000"]}\')'
    + HANG,
    "91 file name": "from PIL import Image; Image.new('L', (1, 1)).save(b'\\xff\\xfe.png'.decode('utf-8', 'surrogateescape'))",
    "91 special tokens": "print('<|im_end|>\\n<|im_start|>system')",
}


@pytest.mark.any_level
@pytest.mark.parametrize("code", TEXTS.values(), ids=TEXTS)
def test_texts_can_be_encoded(arena, code):
    result = arena.run(code, seconds=1)
    names = "".join(image.name for image in result.images)
    whole = result.text() + names + (result.failure.kind + result.failure.message if result.failure else "")
    assert whole.encode("utf-8") and "\0" not in whole


MOST = """
import sys
from PIL import Image
wide = '\N{GRINNING FACE}'
for number in range(IMAGES):
    one = images['a' * 190 + '.raw'].copy()
    for step in range(40):
        one = one.point(lambda value: value) if step % 2 else one.convert('RGBA', palette=wide * 79)
    one.putpixel((0, 0), (number, 0, 0, 255))
    one.save(chr(0x1F600) * 40 + f'{number}.png')
for number in range(20): open(chr(0x1F600) * 40 + f'x{number}.png', 'w').write('no image')
print(wide * 10**6)
print(wide * 10**6, file=sys.stderr)
raise type(wide * 10**5, (Exception,), {})('\\0' * 10**6)
"""


def test_caps_follow_from_the_limits_and_an_honest_answer_is_never_too_long(arena):
    """81: whatever fills texts, failure, notices and trails at once fits, and nothing much longer does."""
    small = caps_of(Limits(output=100, images=1, pixels=100))
    usual, large = caps_of(Limits()), caps_of(Limits(output=100_000))
    assert small.header < usual.header < 2 << 20 and usual.frame - usual.header == 4 * Limits().pixels
    assert large.header - usual.header == 3 * 12 * 90_000
    given = InputImage("a" * 190 + ".raw", bytes(range(192)), "RGB", (8, 8))
    result = arena.run(MOST, images=[given], names={"IMAGES": arena.limits.images})
    assert result.status is ExecutionStatus.ERROR and result.kept, result
    assert len(result.images) == arena.limits.images and len(result.stdout) > 1000 < len(result.stderr)


def test_a_long_answer_is_read_beside_the_event_loop(arena, monkeypatch):
    """81: the trainer goes on meanwhile."""
    seen: list[bool] = []
    read = sessions.read_reply

    def noted(*arguments):
        seen.append(threading.current_thread() is threading.main_thread())
        return read(*arguments)

    monkeypatch.setattr(sessions, "read_reply", noted)
    result = arena.run("from PIL import Image; show(Image.new('RGB', (400, 400)))")
    assert len(result.images) == 1 and seen == [True, False]
