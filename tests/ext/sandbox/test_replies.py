"""What the host makes of forged answers: the real reader of a session's socket, fed with every kind of lie."""

import asyncio
import json
import socket
import struct

import pytest

from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.replies import caps_of, read_reply
from turnwise.ext.sandbox.results import ExecutionStatus, Result
from turnwise.ext.sandbox.session_process import Child
from turnwise.ext.sandbox.wire import ProtocolError

LIMITS = Limits(memory=256 * MIB, output=2000, images=4, pixels=250_000)
CAPS = caps_of(LIMITS)
NUMBER = 2
"""The call that is being answered."""
OK = {"id": NUMBER, "status": "ok"}
PICTURE = {"name": "a", "mode": "L", "size": [1, 1], "length": 1}
FAILURE = {"kind": "a", "message": "b", "traceback": ""}


def frame(header: object, blobs: bytes = b"", total: int | None = None, length: int | None = None) -> bytes:
    """The bytes of one answer, some lengths of which may be lies."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    total = len(encoded) + len(blobs) if total is None else total
    return struct.pack("!II", total, len(encoded) if length is None else length) + encoded + blobs


def answer(**fields: object) -> bytes:
    return frame(OK | fields)


def picture(**changed: object) -> bytes:
    """An answer with one image of one pixel, some fields of which are lies."""
    return frame(OK | {"images": [PICTURE | changed]}, b"x")


def origin(**provenance: object) -> bytes:
    return picture(provenance=provenance)


def written(provenance: bytes) -> bytes:
    """The same with a provenance that only bytes can tell."""
    return frame(
        json.dumps(OK | {"images": [PICTURE | {"provenance": "P"}]}).encode().replace(b'"P"', provenance), b"x"
    )


def step(argument: bytes) -> bytes:
    return written(b'{"steps": [{"name": "x", "arguments": {"a": ' + argument + b"}}]}")


FORGED = {
    "80 garbage": b"\xfe" * 99,
    "80 text": b"GET / HTTP/1.1\r\n\r\n",
    "80 another question": frame({"id": 7, "status": "ok"}),
    "80 no question": frame({"status": "ok"}),
    "80 a truth as number": frame({"id": True, "status": "ok"}),
    "80 two answers at once": frame(OK) * 2,
    "80 status of the host": answer(status="killed"),
    "80 no status": frame({"id": NUMBER}),
    "80 status is a list": answer(status=[]),
    "80 status is an object": answer(status={}),
    "80 status is a number": answer(status=1),
    "81 oversize": frame(b"", total=CAPS.frame + 1, length=0),
    "81 largest numbers": frame(b"", total=2**32 - 1, length=2**32 - 1),
    "81 header larger than all": frame({"id": NUMBER}, total=4, length=99),
    "81 large header": frame(b" " * (CAPS.header + 1)),
    "81 blobs without end": frame(b"{}", bytes(CAPS.frame - 2)),
    "82 not JSON": frame(b"nonsense"),
    "82 empty": frame(b""),
    "82 not text": frame(b"\xff\xfe\x00"),
    "82 a list": frame(b"[]"),
    "82 a number": frame(b"1"),
    "82 deep": frame(b"[" * 100_000 + b"]" * 100_000),
    "82 deep object": frame(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "82 wide": frame(b"[" + b"[]," * 200_000 + b"[]]"),
    "82 not a text": answer(stdout=5),
    "82 notices": answer(notices=["x"] * 1000),
    "82 notices of no text": answer(notices=[[]]),
    "82 failure is a text": answer(failure="x"),
    "82 failure is empty": answer(failure={}),
    "82 line": answer(failure=FAILURE | {"line": 2.5}),
    "82 line is huge": answer(failure=FAILURE | {"line": 10**40}),
    "82 source": answer(failure=FAILURE | {"source": 1}),
    "82 value": answer(value={}),
    "82 images": answer(images={}),
    "82 peak": answer(peak=-1),
    "82 peak is a truth": answer(peak=True),
    "82 peak is infinite": answer(peak=float("inf")),
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
    "85 too many": frame(OK | {"images": [PICTURE] * 9}, b"x" * 9),
    "85 too many pixels": frame(OK | {"images": [PICTURE | {"size": [600, 600], "length": 360_000}]}, bytes(360_000)),
    "85 no name": picture(name=None),
    "85 not an object": answer(images=[1]),
    "85 box": origin(box=[1, 2, 3]),
    "85 box of texts": origin(box=["a"] * 4),
    "85 box of truths": origin(box=[True] * 4),
    "85 box without end": origin(box=[float("inf")] * 4),
    "85 box of nothing": origin(box=[float("nan")] * 4),
    "85 box too large for a fraction": origin(box=[10**4000, 1, 1, 1]),
    "85 steps": origin(steps=[{"name": "x"}] * 1000),
    "85 steps of texts": origin(steps=["x"]),
    "85 arguments": origin(steps=[{"name": "x", "arguments": ["a"]}]),
    "85 endless arguments": origin(steps=[{"name": "x", "arguments": {"a": "b" * 5000}}]),
    "85 deep arguments": step(b"[" * 600 + b"]" * 600),
    "85 deepest arguments": step(b"[" * 950 + b"]" * 950),
    "85 source": origin(source=5),
    "85 provenance": picture(provenance=[1]),
    "89 huge number": frame(b'{"id":' + b"9" * 100_000 + b"}"),
    "89 huge fraction": frame(b'{"id":' + b"9" * 4000 + b".5}"),
    "89 a number that JSON has not": step(b"NaN"),
    "89 no end of numbers": step(b"-Infinity"),
    "90 negative": picture(length=-1),
    "90 negative side": picture(size=[-1, -1]),
    "90 too short": picture(size=[2, 2], length=4),
    "90 blobs of nobody": frame(OK, b"xyz"),
}


def read(data: bytes) -> Result:
    """Its result, read as the host reads that of a process at the other end of the socket."""

    async def work() -> Result:
        ours, theirs = socket.socketpair()
        for one in (ours, theirs):
            one.setblocking(False)
        child = Child(1, ours, CAPS)
        reply = child.expect()
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(theirs, data))
        try:
            return read_reply(await asyncio.wait_for(reply, 30), NUMBER, LIMITS, 0.0)
        finally:
            sending.cancel()
            await asyncio.wait((sending,))
            child.close()
            theirs.close()

    return asyncio.run(work())


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_a_forged_answer_is_no_result(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(data)


def test_an_honest_answer_is_a_result() -> None:
    """Each part that is forged above, told as it should be."""
    steps = [{"name": "crop", "arguments": {"a": [1, {"b": None}]}}]
    honest = OK | {
        "stdout": "out",
        "stderr": "err",
        "value": "42",
        "notices": ["cut"],
        "peak": 7,
        "failure": FAILURE | {"line": 3, "source": "1 / 0"},
        "images": [PICTURE | {"provenance": {"source": "img0", "box": [0, 0, 1, 1], "steps": steps}}],
    }
    result = read(frame(honest, b"x"))
    assert (result.status, result.stdout, result.stderr, result.value) == (ExecutionStatus.OK, "out", "err", "42")
    assert (result.notices, result.peak_memory) == (("cut",), 7)
    assert result.failure is not None and (result.failure.line, result.failure.source) == (3, "1 / 0")
    (image,) = result.images
    assert (image.name, image.size, image.pixels) == ("a", (1, 1), b"x")
    assert image.provenance.source == "img0" and image.provenance.box == (0.0, 0.0, 1.0, 1.0)
    assert [(one.name, one.arguments) for one in image.provenance.steps] == [("crop", {"a": [1, {"b": None}]})]


def test_texts_are_cut_and_can_be_encoded() -> None:
    """91."""
    result = read(answer(stdout="\ud800\0" + "x" * 100_000, value="\udc00", notices=["\ud800\0"]))
    texts = (result.stdout, result.value or "", *result.notices)
    assert all(text.encode() and "\0" not in text for text in texts) and len(result.stdout) < 2 * LIMITS.output
