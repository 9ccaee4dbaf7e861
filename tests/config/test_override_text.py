"""The text of key=value: read as Hydra's own parser reads it, without its functions and sweeps."""

import random

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from turnwise.config.override_text import Unreadable, read_override

PIECES = [
    "a", "true", "FALSE", "null", "1", "-2", "1_0", "01", "1e3", ".5", "5.", "-inf", "nan", "0x1", "x-y", "tr", "ue", "1.5.2",
    "'", '"', "''", "'a'", '"b c"', "\\", "\\\\", "\\'", '\\"', "\\,", "\\ ", "\\[", "[", "]", "{", "}", "(", ")", ":", "=",
    ",", " ", "\t", "/", "+", ".", "$", "%", "*", "@", "?", "|", "#", "!", "“", "\n", "${x}", "http://a:1/v1", "C:\\d",
    "[a, b]", "{a: 1}", "{a: [1, {b: c}]}",
]  # fmt: skip
CASES = 3000


def nested(rng: random.Random, depth: int) -> str:
    """Text that often is a value: pieces in lists and dicts, with spaces where they may stand."""
    space = rng.choice(["", "", " "])
    if depth == 0 or rng.random() < 0.5:
        return space + rng.choice(PIECES) + rng.choice(["", "", " ", rng.choice(PIECES)])
    parts = [nested(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.5:
        return "[" + space + f"{space},".join(parts) + space + "]"
    return "{" + space + f"{space},".join(f"{rng.choice(PIECES[:17])}{space}:{part}" for part in parts) + space + "}"


def by_hydra(parser: OverridesParser, text: str) -> str | None:
    try:
        override = parser.parse_override(text)
    except HydraException:
        return None
    return None if override.is_sweep_override() else repr((override.key_or_group, override.value()))


def by_us(text: str) -> str | None:
    try:
        override = read_override(text)
    except Unreadable as error:
        assert "\n" not in str(error) and str(error)
        return None
    return repr((override.key, override.value))


def test_every_text_is_read_as_by_hydra() -> None:
    rng, parser = random.Random(0), OverridesParser.create()
    texts = [f"some.key={nested(rng, 3)}" for _ in range(CASES)]
    texts += ["k=" + "".join(rng.choices(PIECES, k=rng.randint(0, 6))) for _ in range(CASES)]
    read = [by_us(text) for text in texts]
    assert [(text, ours) for text, ours in zip(texts, read, strict=True) if ours != by_hydra(parser, text)] == []
    assert 0.8 * CASES < sum(ours is not None for ours in read) < 1.6 * CASES


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k=int(3)", None),
        ("k=choice(a,b)", None),
        ("k=a,b", None),
        ("~k=1", None),
        ("k@place=1", None),
        ("k=" + "9" * 5000, None),
        ("+k=1", 1),
        ("++k={a: 'b, c', d: [x y, \\[]}", {"a": "b, c", "d": ["x y", "["]}),
        ("k='it\\'s'", "it's"),
        ("k='a\\\\'", "a\\"),
    ],
)
def test_what_is_read_and_what_is_refused(text: str, value: object) -> None:
    if value is None:
        with pytest.raises(Unreadable):
            read_override(text)
    else:
        assert read_override(text).value == value


@pytest.mark.parametrize("text", ["daten/größe.parquet", "日本", "jose\u0301", "[a, é]", "नमस्ते"])
def test_letters_of_every_script_need_no_quotes(text: str) -> None:
    value = read_override(f"k={text}").value
    assert value == (["a", "é"] if text.startswith("[") else text)
    with pytest.raises(Unreadable, match="cannot stand there"):
        read_override(f"k=“{text}”")  # the quotes of a web page are none
