"""`LLM_AS_A_JUDGE_BASE`: where the judge is, for scorers that are told no address."""

import json
from collections.abc import Iterator

from turnwise.config import Config
from turnwise.config.environment import Use, is_address, value
from turnwise.errors import ConfigError
from turnwise.errors.address_passwords import has_userinfo, without_userinfo

JUDGE = "LLM_AS_A_JUDGE_BASE"


def judge_addresses() -> tuple[str, ...]:
    """The endpoints of LLM_AS_A_JUDGE_BASE, comma separated."""
    addresses = tuple(address.strip() for address in (value(JUDGE) or "").split(",") if address.strip())
    for address in addresses:
        if has_userinfo(address):
            raise ConfigError(f"{JUDGE}: no name or password in an address, since it is shown: set OPENAI_API_KEY")
        if not is_address(address):
            raise ConfigError(
                f"{JUDGE}: the address {without_userinfo(address, alone=True)!r} must be like http://localhost:18901/v1"
            )
    return addresses


def fill_in(config: Config) -> Iterator[tuple[str, str, str]]:
    """Nothing: whoever asks a judge reads the variable."""
    yield from ()


def use(name: str, config: Config) -> Use:
    """Whether a scorer asks a judge."""
    used = "judge" in json.dumps([config.scoring.scorers, config.scoring.options], default=str)
    effect = "the judge's endpoints, where scoring.options names none" if used else "no scorer asks a judge"
    return Use(name, without_userinfo(value(name) or ""), effect, used)
