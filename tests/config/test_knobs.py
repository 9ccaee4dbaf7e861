"""Every number of the config has a range, and a value outside it is refused in one line, wherever it was set."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Config, SamplingConfig, ScoringConfig, TrainingConfig
from turnwise.config.check import check_config
from turnwise.config.knobs import Range, range_of, without_null
from turnwise.config.sections import full_config, with_section
from turnwise.data.task_config import compose, configure
from turnwise.errors import ConfigError
from turnwise.ext.board.config import BoardConfig


def numbers(section: type, prefix: str = "") -> Iterator[tuple[str, type, Range | None]]:
    """(key, int or float, its range) of every numeric knob."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        hint = without_null(hints[field.name])
        if dataclasses.is_dataclass(hint):
            yield from numbers(typing.cast(type, hint), f"{prefix}{field.name}.")
        elif hint in (int, float):
            yield prefix + field.name, hint, range_of(field, hint)


NUMBERS = list(numbers(full_config()))


def outside(hint: type, limits: Range) -> list[Any]:
    """Values beyond each end of a range, and those that no knob takes."""
    step = 1 if hint is int else 1e-9
    found: list[Any] = [] if hint is int else [math.nan, math.inf, -math.inf]
    if limits.least is not None:
        found.append(hint(limits.least) if limits.above else hint(limits.least - step))
        found.append(hint(-1e18))
    if limits.most is not None:
        found.append(hint(limits.most) + (1 if hint is int else 1e-6 * hint(limits.most)))
    return found


def test_every_number_declares_a_range() -> None:
    assert len(NUMBERS) > 60
    assert [key for key, _, limits in NUMBERS if limits is None] == []
    for key, hint, limits in NUMBERS:
        assert hint is float or limits.most is not None, f"{key}: whole numbers have an end"


@pytest.mark.parametrize(("key", "hint", "limits"), NUMBERS, ids=[key for key, _, _ in NUMBERS])
def test_a_value_outside_its_range_is_refused_in_one_line(key: str, hint: type, limits: Range) -> None:
    values = outside(hint, limits)
    assert values
    for value in values:
        config = full_config()()
        section, _, name = key.rpartition(".")
        setattr(getattr(config, section) if section else config, name, value)
        with pytest.raises(ConfigError) as caught:
            check_config(config)
        check_refusal(str(caught.value), key, value, limits)
    values = values if key in ("seed", "sampling.temperature", "training.keep") else values[-1:]
    for value in values:  # composing takes a hundred times as long: every value for some keys, the last one for each
        with pytest.raises(ConfigError) as caught:
            compose([f"{key}={value}"])
        check_refusal(str(caught.value), key, value, limits)


def check_refusal(text: str, key: str, value: Any, limits: Range) -> None:
    assert "\n" not in text
    assert key in text and str(value) in text and str(limits) in text, text


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("seed", -1, "-1"),
        ("algorithm.turn_gamma", 1.5, "1.5"),
        ("learner.lr", -1e18, "-1.0e+18"),
        ("sampling.temperature", math.nan, ".nan"),
        ("sampling.temperature", math.inf, ".inf"),
        ("sampling.temperature", -math.inf, "-.inf"),
    ],
)
def test_a_value_outside_its_range_is_refused_with_the_file_it_is_in(
    key: str, value: float, shown: str, tmp_path: Path
) -> None:
    section, _, name = key.rpartition(".")
    file = tmp_path / "mine.yaml"
    file.write_text(f"{section}:\n  {name}: {shown}\n" if section else f"{name}: {shown}\n")
    with pytest.raises(ConfigError) as caught:
        compose([], file)
    (limits,) = [limits for known, _, limits in NUMBERS if known == key]
    check_refusal(str(caught.value), key, value, limits)
    assert str(file) in str(caught.value)


def test_the_ends_of_a_range_belong_to_it() -> None:
    for text in ("training.keep=1", "training.target=1", "training.target=0", "board.port=65535", "learner.lr=0"):
        configure(text)
    assert str(Range()) == "a finite number" and str(Range(0, 1)) == "at least 0 and at most 1"
    assert str(Range(0.5, above=True)) == "more than 0.5"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (Config(training=TrainingConfig(steps=-1)), "training.steps must be at least 1"),
        (Config(sampling=SamplingConfig(temperature="hot")), "sampling.temperature must be a number, not 'hot'"),
        (Config(sampling=SamplingConfig(top_k=1.5)), "sampling.top_k must be a whole number, not 1.5"),
        (Config(sampling=SamplingConfig(top_k=True)), "sampling.top_k must be a whole number, not True"),
        (Config(sampling=SamplingConfig(stop="x")), "sampling.stop must be a list of texts, not 'x'"),
        (Config(sampling=SamplingConfig(temperature=1e-40)), "must be 0 (greedy) or at least 0.001"),
        (Config(scoring=ScoringConfig(weights={"a": math.nan})), "scoring.weights must be a mapping whose values"),
        (Config(scoring=ScoringConfig(run="pool")), "scoring.run must be one of 'inline'"),
        (Config(sampling={"top_k": 1}), "sampling must be a SamplingConfig"),
        (Config(run="a\0b"), "run must be text without null characters"),
        (with_section(Config(), BoardConfig(live=1)), "board.live must be true or false, not 1"),
        (Config(seed=None), "seed must be a whole number, not None"),
        ("sampling.temperature=0", "expected a Config"),
        (None, "expected a Config"),
    ],
)  # fmt: skip
def test_a_config_made_in_python_is_checked_as_well(made: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(made)
    assert expected in str(caught.value)
