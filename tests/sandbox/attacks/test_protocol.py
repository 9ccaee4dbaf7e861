"""Attacks 80-91 and 97: a session that writes the answers itself, breaks the harness around it, or answers out of turn."""

import asyncio
import threading

import pytest

from turnwise.sandbox import session as sessions
from turnwise.sandbox.limits import Limits
from turnwise.sandbox.replies import caps_of
from turnwise.sandbox.results import InputImage, Result, Status

PICTURE = {"name": "a", "mode": "L", "size": [1, 1], "length": 1}


def picture(**changed: object) -> str:
    """An answer with one image of one pixel, some fields of which are lies."""
    return f"forge({{'id': 2, 'status': 'ok', 'images': [{PICTURE | changed!r}]}}, b'x')"


def origin(**provenance: object) -> str:
    return picture(provenance=provenance)


HANG = "\nwhile True: time.sleep(1)"
FORGED = {
    "80 garbage": "os.write(3, os.urandom(99))",
    "80 text": "os.write(3, b'GET / HTTP/1.1\\r\\n\\r\\n')",
    "80 another question": "forge({'id': 7, 'status': 'ok'})",
    "80 no question": "forge({'status': 'ok'})",
    "80 a truth as number": "forge({'id': True, 'status': 'ok'})",
    "80 two answers at once": 'e = b\'{"id":2,"status":"ok"}\'; os.write(3, (struct.pack(\'!II\', len(e), len(e)) + e) * 2)',
    "80 status of the host": "forge({'id': 2, 'status': 'killed'})",
    "80 no status": "forge({'id': 2})",
    "80 status is a list": "forge({'id': 2, 'status': []})",
    "80 status is an object": "forge({'id': 2, 'status': {}})",
    "80 status is a number": "forge({'id': 2, 'status': 1})",
    "81 oversize": "forge(b'', total=FRAME + 1, length=0)",
    "81 largest numbers": "forge(b'', total=2**32 - 1, length=2**32 - 1)",
    "81 header larger than all": "forge({'id': 2}, total=4, length=99)",
    "81 large header": "forge(b' ' * (HEADER + 1))",
    "81 blobs without end": "forge(b'{}', bytes(FRAME - 2))",
    "82 not JSON": "forge(b'nonsense')",
    "82 empty": "forge(b'')",
    "82 not text": "forge(b'\\xff\\xfe\\x00')",
    "82 a list": "forge(b'[]')",
    "82 a number": "forge(b'1')",
    "82 deep": "forge(b'[' * 100000 + b']' * 100000)",
    "82 deep object": "forge(b'{\"a\":' * 50000 + b'1' + b'}' * 50000)",
    "82 wide": "forge(b'[' + b'[],' * 500000 + b'[]]')",
    "82 not a text": "forge({'id': 2, 'status': 'ok', 'stdout': 5})",
    "82 notices": "forge({'id': 2, 'status': 'ok', 'notices': ['x'] * 1000})",
    "82 notices of no text": "forge({'id': 2, 'status': 'ok', 'notices': [[]]})",
    "82 failure is a text": "forge({'id': 2, 'status': 'ok', 'failure': 'x'})",
    "82 failure is empty": "forge({'id': 2, 'status': 'ok', 'failure': {}})",
    "82 line": "forge({'id': 2, 'status': 'ok', 'failure': {'kind': 'a', 'message': 'b', 'line': 2.5, 'traceback': ''}})",
    "82 line is huge": "forge({'id': 2, 'status': 'ok', 'failure': {'kind': 'a', 'message': 'b', 'line': 10**40, 'traceback': ''}})",
    "82 source": "forge({'id': 2, 'status': 'ok', 'failure': {'kind': 'a', 'message': 'b', 'source': 1, 'traceback': ''}})",
    "82 value": "forge({'id': 2, 'status': 'ok', 'value': {}})",
    "82 images": "forge({'id': 2, 'status': 'ok', 'images': {}})",
    "82 peak": "forge({'id': 2, 'status': 'ok', 'peak': -1})",
    "82 peak is a truth": "forge({'id': 2, 'status': 'ok', 'peak': True})",
    "82 peak is infinite": 'forge(b\'{"id": 2, "status": "ok", "peak": Infinity}\')',
    "85 size": picture(size=[1 << 19, 1 << 19]),
    "85 size and length": picture(size=[1 << 19, 1 << 12], length=1 << 31),
    "85 no size": picture(size=[0, 0], length=0),
    "85 fractions": picture(size=[1.0, 1.0]),
    "85 three sides": picture(size=[1, 1, 1]),
    "85 size of texts": picture(size=["1", "1"]),
    "85 huge": picture(size=[10**30, 1]),
    "85 mode": picture(mode="CMYK"),
    "85 mode is nothing": picture(mode=None),
    "85 mode is a list": picture(mode=[]),
    "85 mode is an object": picture(mode={}),
    "85 too many": f"forge({{'id': 2, 'status': 'ok', 'images': [{PICTURE!r}] * 9}}, b'x' * 9)",
    "85 too many pixels": f"forge({{'id': 2, 'status': 'ok', 'images': [{PICTURE | {'size': [600, 600], 'length': 360_000}!r}]}}, bytes(360_000))",
    "85 no name": picture(name=None),
    "85 not an object": "forge({'id': 2, 'status': 'ok', 'images': [1]})",
    "89 huge number": "forge(b'{\"id\":' + b'9' * 100000 + b'}')",
    "89 huge fraction": "forge(b'{\"id\":' + b'9' * 4000 + b'.5}')",
    "90 negative": picture(length=-1),
    "90 negative side": picture(size=[-1, -1]),
    "90 too short": picture(size=[2, 2], length=4),
    "90 blobs of nobody": "forge({'id': 2, 'status': 'ok'}, b'xyz')",
    "85 box": origin(box=[1, 2, 3]),
    "85 box of texts": origin(box=["a"] * 4),
    "85 box of truths": origin(box=[True] * 4),
    "85 box without end": picture(provenance="BOX").replace("'BOX'", "{'box': [float('inf')] * 4}"),
    "85 box of nothing": picture(provenance="BOX").replace("'BOX'", "{'box': [float('nan')] * 4}"),
    "85 box too large for a fraction": picture(provenance="BOX").replace("'BOX'", "{'box': [10**4000, 1, 1, 1]}"),
    "85 steps": origin(steps=[{"name": "x"}] * 1000),
    "85 steps of texts": origin(steps=["x"]),
    "85 arguments": origin(steps=[{"name": "x", "arguments": ["a"]}]),
    "85 endless arguments": origin(steps=[{"name": "x", "arguments": {"a": "b" * 5000}}]),
    "85 source": origin(source=5),
    "85 provenance": picture(provenance=[1]),
    "85 deep arguments": "deep = []\nfor _ in range(600): deep = [deep]\n"
    + picture(provenance="P").replace("'P'", "{'steps': [{'name': 'x', 'arguments': {'a': deep}}]}"),
    "85 deepest arguments": "deep = b'[' * 950 + b']' * 950\n"
    'forge(b\'{"id":2,"status":"ok","images":[{"name":"a","mode":"L","size":[1,1],"length":1,"provenance":'
    '{"steps":[{"name":"x","arguments":{"a":\' + deep + b\'}}]}}]}\', b\'x\')',
}


def run_all(arena, codes: dict[str, str], seconds: float) -> dict[str, Result | BaseException]:
    """Each in a session of its own, several at a time, because the host waits a moment for each to end by itself."""

    async def one(code: str) -> Result:
        async with arena.pool.session() as session:
            caps = caps_of(arena.limits)
            await session.run(arena.prelude({"HEADER": caps.header, "FRAME": caps.frame}))
            return await session.run(code, seconds)

    async def work() -> list[Result | BaseException]:
        return await asyncio.gather(*map(one, codes.values()), return_exceptions=True)

    return dict(zip(codes, arena.do(work()), strict=True))


@pytest.fixture(scope="module")
def answers_to_forgery(pool_under_attack) -> dict[str, Result | BaseException]:
    return run_all(pool_under_attack, {name: code + HANG for name, code in FORGED.items()}, 5)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_answer_ends_the_session_and_nothing_else(arena, answers_to_forgery, name):
    result = answers_to_forgery[name]
    if isinstance(result, BaseException):
        raise result
    assert result.status is Status.KILLED and not result.kept, result
    assert result.stdout == result.stderr == "" and result.value is None and result.images == ()


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


@pytest.fixture(scope="module")
def answers_of_broken_lines(pool_under_attack) -> dict[str, Result | BaseException]:
    return run_all(pool_under_attack, BROKEN_OFF, 0.5)


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_a_broken_line_ends_the_session_and_nothing_else(arena, answers_of_broken_lines, name):
    result = answers_of_broken_lines[name]
    assert isinstance(result, Result), result
    assert result.status in (Status.KILLED, Status.TIMEOUT), result
    assert result.images == () and result.value is None


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
    "86 show": "show = None; import turnwise.sandbox.inside.images as i; i.Gallery.collect = i.Gallery.summary = None",
    "86 worker": "w = sys.modules['turnwise.sandbox.inside.worker']; w.Session.answer = w.Session.reply = w.Channel.write = None",
    "86 frames": "f = sys._getframe()\nwhile f: g = f; f = f.f_back; g.f_globals.clear()",
    "86 interval": "sys.setswitchinterval(1e9)",
    "88 atexit": "import atexit; atexit.register(lambda: time.sleep(60))",
    "88 __del__": "class D:\n    def __del__(self): time.sleep(60)\nkeep = D()",
    "86 folder gone": "os.chdir('/'); import shutil; shutil.rmtree(os.environ.get('TMPDIR', '/scratch'), ignore_errors=True)",
}


@pytest.mark.parametrize("code", HARNESS.values(), ids=HARNESS)
def test_a_broken_harness_is_the_session_s_own_loss(arena, code):
    """It may go on or be ended; what it answers is an answer, and the host lives."""
    result = arena.run(code, "1 + 1", seconds=1)
    assert result.value == "2" or result.status in (Status.KILLED, Status.ERROR, Status.TIMEOUT), result


def test_a_session_that_reads_nothing_more_does_not_hold_the_host(arena):
    """83: it answers in the worker's place, and the next request does not fit into the socket."""

    async def work():
        async with arena.pool.session() as session:
            await session.run(arena.prelude({}))
            result = await session.run("forge({'id': 2, 'status': 'ok'})" + HANG)
            assert result.status is Status.OK
            return await session.run("#" * 1_000_000, 0.2)

    assert arena.do(work(), limit=2).status in (Status.TIMEOUT, Status.KILLED)


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
    assert result.value == "4" or result.status is Status.KILLED, result


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
    assert result.value in (None, "'honest'", "early"), result
    assert result.value != "early" or result.status is Status.OK  # a session may lie about itself


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


@pytest.mark.parametrize("code", TEXTS.values(), ids=TEXTS)
def test_texts_can_be_encoded(arena, code):
    result = arena.run(code, seconds=1)
    names = "".join(image.name for image in result.images)
    whole = result.text() + names + (result.failure.kind + result.failure.message if result.failure else "")
    assert whole.encode("utf-8") and "\0" not in whole


def test_numbers_that_json_has_not(arena):
    """89: arguments of a step go into records that are read as JSON."""
    import json

    code = picture(provenance="P").replace(
        "'P'", "{'steps': [{'name': 'x', 'arguments': {'a': float('nan'), 'b': float('inf')}}]}"
    )
    result = arena.run(code, seconds=1)
    assert json.dumps([step.arguments for one in result.images for step in one.provenance.steps], allow_nan=False)


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
    assert result.status is Status.ERROR and result.kept, result
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
