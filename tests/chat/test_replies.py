"""Finding replies in a rendered text by the text with marks in their place."""

import pytest

from turnwise.chat.control_tokens import fresh_mark, place, shared

M = ["M0", "M1", "M2"]


@pytest.mark.parametrize(
    ("tail", "skeleton", "texts", "expected"),
    [
        ("<a>words</a>", "<a>M0</a>", ["words"], ["words"]),
        ("tool\ntool\n", "tool\nM0\n", ["tool"], ["tool"]),
        ("<a></a>", "<a>M0</a>", ["  "], [""]),
        ("<a>x</a><a>y</a>", "<a>M0</a><a>M1</a>", ["x", "y"], ["x", "y"]),
        ("<a>x</a>", "<a>M0</a>", [" x\n"], ["x"]),
        ("<a>x</a><a>y</a>", "<a>M0</a><a>M1</a>", [" x ", "y\n"], ["x", "y"]),
        ("<a></a><a></a><a>x</a></a>", "<a>M0</a><a>M1</a>", ["</a><a>", "x</a>"], ["</a><a>", "x</a>"]),
        ("<a></a><a></a><a>x</a>", "<a>M0</a><a>M1</a>", [" </a><a> ", "x"], ["</a><a>", "x"]),
        ('["a\\n"]["b"]', '["M0"]["M1"]', ["a\n", "b"], ["a\\n", "b"]),
        ("xyz", "M0M1M2", ["x", "y", "z"], ["x", "y", "z"]),
        ("<b>x</b>", "<a>M0</a>", ["x"], None),
        ("<a>x</b>", "<a>M0</a>", ["x"], None),
        ("<a>x<a>y</a>", "<a>M0</a><a>M1</a>", ["x", "y"], None),
        ("<a>", "<a>M0</a>", ["x"], None),
    ],
)
def test_places(tail, skeleton, texts, expected):
    places = place(tail, skeleton, M[: len(texts)], texts)
    assert (places and [tail[start:end] for start, end in places]) == expected


def test_a_mark_stands_nowhere_else():
    first = fresh_mark(())
    assert first.isalnum()
    second = fresh_mark([f"text with {first} in it"])
    assert second not in f"text with {first} in it"


def test_shared_counts_equal_items_from_the_start():
    assert [shared("abc", "abd"), shared("abc", "abc"), shared([1, 2], [1, 2, 3]), shared("", "x")] == [2, 3, 2, 0]
