"""A judge's options: names, values, and where the addresses come from."""

import pytest

from turnwise.errors import ConfigError
from turnwise.ext.judge.settings import DEFAULT_URL, JudgeSettings


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"vote": 3}, "did you mean 'votes'"),
        ({"votes": 2}, "odd"),
        ({"votes": "many"}, "votes='many'"),
        ({"timeout": 0}, "timeout"),
        ({"retries": -1}, "retries"),
        ({"concurrency": 0}, "concurrency"),
        ({"base_urls": ["localhost:18901"]}, "must be like"),
        ({"base_urls": "ftp://a/v1"}, "must be like"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        JudgeSettings.of(options)


def test_addresses_come_from_the_settings_then_the_environment_then_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LLM_AS_A_JUDGE_BASE", raising=False)
    assert JudgeSettings().urls() == (DEFAULT_URL,)
    monkeypatch.setenv("LLM_AS_A_JUDGE_BASE", "http://a:1/v1/, http://b:2/v1,http://a:1/v1,")
    assert JudgeSettings().urls() == ("http://a:1/v1", "http://b:2/v1")
    assert JudgeSettings.of({"base_urls": "http://c:3/v1"}).urls() == ("http://c:3/v1",)
    monkeypatch.setenv("LLM_AS_A_JUDGE_BASE", "a:1")
    with pytest.raises(ConfigError, match="a:1"):
        JudgeSettings().urls()


def test_the_key_is_sent_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    assert "Authorization" not in JudgeSettings(api_key_env="MY_KEY").headers()
    monkeypatch.setenv("MY_KEY", "s3cret")
    assert JudgeSettings(api_key_env="MY_KEY").headers()["Authorization"] == "Bearer s3cret"
    monkeypatch.setenv("MY_KEY", "two\nlines")
    with pytest.raises(ConfigError, match="MY_KEY"):
        JudgeSettings(api_key_env="MY_KEY").headers()


def test_equal_settings_have_equal_keys() -> None:
    one, two = (
        JudgeSettings.of({"votes": 3, "extra_body": {"a": 1}}),
        JudgeSettings.of({"votes": "3", "extra_body": {"a": 1}}),
    )
    assert one == two and one.key == two.key != JudgeSettings().key
