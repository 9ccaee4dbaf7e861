"""A file that grows gives each whole line once; one that was replaced says so and begins again."""

import os

from turnwise.storage.file_tail import FileTail, end_of_text


def polled(tail: FileTail) -> tuple[bool, list[bytes]]:
    replaced, lines = tail.poll()
    return replaced, list(tail.read(lines))


def test_whole_lines_come_once_and_a_half_one_waits(tmp_path):
    path = tmp_path / "lines"
    tail = FileTail(path)
    assert polled(tail) == (False, [])
    path.write_bytes(b"one\n\ntwo\nthr")
    assert polled(tail) == (False, [b"one\n", b"two\n"])
    assert polled(tail) == (False, [])
    with path.open("ab") as file:
        file.write(b"ee\n" + b"x" * (3 << 20) + b"\n")
    assert [len(line) for line in polled(tail)[1]] == [6, (3 << 20) + 1]
    path.unlink()
    assert polled(tail) == (True, []) and polled(tail) == (False, [])


def test_a_file_written_anew_is_another_even_in_the_same_place(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsame end\n")
    tail = FileTail(path)
    polled(tail)
    inode = os.stat(path).st_ino
    path.write_bytes(b"other\nsame end\nmore\n")
    assert os.stat(path).st_ino == inode
    assert polled(tail) == (True, [b"other\n", b"same end\n", b"more\n"])


def test_the_end_of_a_text_begins_with_a_whole_line(tmp_path):
    path = tmp_path / "log.txt"
    assert end_of_text(path, 10) == ""
    path.write_text("first\nsecond\nthird\n")
    assert end_of_text(path, 100) == "first\nsecond\nthird\n"
    assert end_of_text(path, 10) == "third\n"
