"""Whatever a model writes is read without an exception, in every format: a small share of what benchmarks/parsers.py does."""

import sys
from pathlib import Path

import pytest

from turnwise.chat.calls.tool_format import load_format
from turnwise.system.plugins import names_in

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import parsers

NAMES = names_in("turnwise.chat.formats")


@pytest.mark.parametrize("name", NAMES)
def test_fuzzed_texts_are_read(name: str) -> None:
    characters, calls, problems = parsers.fuzz(name, 1500, seed=1)
    assert characters > 50_000 and calls > problems > 0, "some calls survive the mutations, others do not"


@pytest.mark.parametrize("name", NAMES)
def test_adversarial_texts_are_read_and_nothing_is_run(name: str) -> None:
    for unit in parsers.UNITS.values():
        piece = unit(parsers.OPENINGS[name])
        message = load_format(name).parse(piece * 500, turn=0, in_reasoning=False)
        assert message.text == piece * 500 and all(call.problem for call in message.tool_calls)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_breaks_off_into_a_long_run_is_read_to_its_end(name: str) -> None:
    """No time is asserted: what goes back over a run for each of its characters would not end."""
    read = load_format(name).parse
    opening = "".join(parsers.OPENINGS[name])
    for cut in range(1, len(opening) + 1):
        for run in ("a", " ", '"', "a: "):
            text = opening[:cut] + run * 30_000
            assert read(text, turn=0, in_reasoning=False).text == text


def test_every_format_is_measured() -> None:
    assert sorted(parsers.OPENINGS) == NAMES
