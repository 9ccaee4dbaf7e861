import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.ext.sandbox.inside.capture import HeadTail, RawOutput, TextStream, cut, joined

TEXTS = st.text(alphabet=st.sampled_from("ab\n\x00é\U0001f600\ud800"), max_size=30)


def reference(text: str, cap: int) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= cap:
        return text
    return joined(text[: cap // 2], text[len(text) - (cap - cap // 2) :], len(text) - cap)


@given(st.lists(TEXTS, max_size=40), st.integers(0, 50))
def test_what_is_kept_does_not_depend_on_the_pieces(pieces, cap):
    sink = HeadTail(cap)
    for piece in pieces:
        sink.write(piece)
    assert sink.text() == reference("".join(pieces), cap)


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 300_000)), max_size=5), st.integers(1, 100_000))
def test_long_pieces_too(pieces, cap):
    sink = HeadTail(cap)
    for letter, count in pieces:
        sink.write(letter * count)
    assert sink.text() == reference("".join(letter * count for letter, count in pieces), cap)


def test_a_long_text_keeps_both_ends_and_says_what_is_missing():
    assert cut("a" * 10 + "b" * 10, 6) == "aaa\n[14 characters left out]\nbbb"
    assert cut("abc", 3) == "abc"


def test_memory_is_bounded_by_the_cap():
    sink = HeadTail(1000)
    for _ in range(300_000):
        sink.write("x")
    sink.write("y" * 10_000_000)
    assert sum(map(len, sink._head)) + sum(map(len, sink._tail)) <= 3000
    assert sink.text().endswith("y" * 500)


@given(st.lists(st.binary(max_size=8), max_size=10))
def test_bytes_in_pieces_are_the_text_they_are_together(pieces):
    stream = TextStream("<stdout>", HeadTail(10_000), 1)
    for piece in pieces:
        stream.buffer.write(piece)
    whole = b"".join(pieces)
    # a character that was begun and not finished is still waiting for its end
    assert whole.decode("utf-8", "backslashreplace").startswith(stream._sink.text())


def test_the_stream_looks_like_a_text_stream():
    sink = HeadTail(1000)
    stream = TextStream("<stdout>", sink, 1)
    print("a", 1, file=stream, flush=True)
    stream.writelines(["b\n", "c\n"])
    stream.buffer.write(memoryview(b"d\n"))
    stream.buffer.flush()
    stream.close()
    stream.reconfigure(encoding="latin-1")
    assert stream.write("e\ud800\n") == 3
    assert sink.text() == "a 1\nb\nc\nd\ne\\ud800\n"
    assert isinstance(stream, io.TextIOBase) and stream.encoding == "utf-8" and stream.errors == "backslashreplace"
    assert stream.fileno() == 1 and not stream.isatty() and stream.writable() and not stream.readable()
    with pytest.raises(TypeError):
        stream.write(b"bytes")


def test_a_string_of_another_class_is_taken_as_its_characters():
    class Loud(str):
        def isascii(self):
            raise AssertionError

    sink = HeadTail(10)
    TextStream("<stdout>", sink, 1).write(Loud("x"))
    assert sink.text() == "x"


def test_raw_output_is_read_once_and_a_full_file_is_told():
    descriptor = os.memfd_create("raw")
    os.ftruncate(descriptor, 10)
    raw, sink = RawOutput(descriptor), HeadTail(100)
    assert not raw.drain(sink)
    os.write(descriptor, b"abc\xff")
    assert not raw.drain(sink)
    assert not raw.drain(sink)
    assert sink.text() == "abc\\xff"
    os.write(descriptor, b"0123456789")
    assert raw.drain(sink)
    os.close(descriptor)
    assert sink.text() == "abc\\xff0123456789"


def test_a_pipe_is_not_read():
    read, write = os.pipe()
    assert not RawOutput(write).drain(HeadTail(10))
    os.close(read)
    os.close(write)
