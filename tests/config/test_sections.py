"""Options of extensions: a section each, in the same tree as the core's; old keys are answered with the new ones."""

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from turnwise import extensions
from turnwise.config import Config, sections
from turnwise.config.knobs import harmless, knob, knobs_of, only, reaches
from turnwise.config.old_keys import renamed
from turnwise.config.sections import complete, full_config, section, to_yaml, value_of, with_section, with_value
from turnwise.data.task_config import compose, configure
from turnwise.errors import ConfigError
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.training.runs.trust import reached

MOST_CORE_KNOBS = 155


@dataclass
class ShopConfig:
    """A shop of somebody else's."""

    url: str | None = knob(None, reaches("network"))
    """Where it is. Set it to buy something."""
    items: int = knob(3, only("shop.url", "*"))
    """How many. Raise it when hungry."""
    door: str = "front"
    """A text without a mark. Set it when the front is closed."""
    colour: str = knob("red", harmless())
    """Another. Set it to please."""


@dataclass
class Engine:
    """A section that is called like the core's."""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    """Puts an extension into the table, for the time of a test."""

    def put(name: str, place: str) -> None:
        entries = {**extensions.extensions(), name: extensions.Extension(section=place)}
        monkeypatch.setattr(sections, "extensions", lambda: entries)
        for cached in (sections.extension_sections, sections.full_config):
            cached.cache_clear()

    yield put
    monkeypatch.undo()
    for cached in (sections.extension_sections, sections.full_config):
        cached.cache_clear()


def test_the_core_has_few_knobs_and_every_section_is_an_extensions() -> None:
    assert len(knobs_of(Config)) <= MOST_CORE_KNOBS
    assert set(full_config().__annotations__) <= set(extensions.extensions())


def test_a_config_made_by_hand_has_every_section_by_default() -> None:
    assert section(Config(), SandboxConfig) == SandboxConfig() and complete(Config()) == full_config()()
    changed = with_section(Config(seed=3), SandboxConfig(seconds=2))
    assert section(changed, SandboxConfig).seconds == 2 and changed.seed == 3
    assert value_of(with_value(Config(), "ray.samplers", 4), "ray.samplers") == 4
    assert section(replace(changed, seed=4), SandboxConfig).seconds == 2
    with pytest.raises(ConfigError, match="Engine is not a section of an extension"):
        section(Config(), Engine)


def test_the_whole_tree_goes_to_other_processes() -> None:
    config = configure("ray.samplers=2")
    assert pickle.loads(pickle.dumps(config)) == config and section(config, RayConfig).samplers == 2


def test_a_section_of_somebody_elses_is_a_section(table, tmp_path: Path) -> None:
    table("shop", f"{__name__}:ShopConfig")
    config = compose_shop("shop.url=http://a:1", "shop.items=5")
    assert section(config, ShopConfig) == ShopConfig("http://a:1", 5)
    assert list(reached(config)) == [("shop.url", "http://a:1")]
    assert list(reached(compose_shop("shop.door=back", "shop.colour=blue"))) == [("shop.door", "back")]
    assert "shop:" in to_yaml(config)


def compose_shop(*overrides: str) -> Config:
    tree = full_config()()
    for text in overrides:
        key, _, value = text.partition("=")
        tree = with_value(tree, key, int(value) if value.isdecimal() else value)
    return tree


@pytest.mark.parametrize(
    ("name", "place", "problem"),
    [
        ("shop", "no_such_module:Shop", "its section no_such_module:Shop is not there"),
        ("shop", f"{__name__}:NoShop", "is not there"),
        ("shop", f"{__name__}:compose_shop", "is not a dataclass"),
        ("engine", f"{__name__}:Engine", "cannot be called like the core's key 'engine'"),
    ],
)
def test_a_section_that_cannot_be_is_refused_by_the_extensions_name(table, name: str, place: str, problem: str) -> None:
    table(name, place)
    with pytest.raises(ConfigError, match=f"the extension {name}: ") as caught:
        full_config()
    assert problem in str(caught.value)


@pytest.mark.parametrize(("old", "new"), renamed().items())
def test_an_old_key_is_answered_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"'{old}' is called {new} now"):
        compose([f"{old}=1"])


def test_the_config_of_a_run_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "task: arithmetic\nboard: true\nboard_port: 7008\ncluster: {name: ray, samplers: 3}\ncompat: {strict: true}\n"
        "engine: {name: vllm_server, replicas: 2, servers: []}\nsandbox: {swe_url: 'http://a:1', seconds: 4}\n"
        "sft: {script: 'turnwise.tasks.arithmetic:script'}\ntracking: {project: sums}\n"
    )
    values = compose([], recorded=tmp_path / "config.yaml").values()
    new = {"board.live": True, "board.port": 7008, "ray.samplers": 3, "verl.strict": True, "servers.replicas": 2}
    new |= {"swe.url": "http://a:1", "sandbox.seconds": 4.0, "trackers.project": "sums"}
    assert {key: values[key] for key in new} == new
    assert values["sft.script"] == "turnwise.data.tasks.arithmetic:script"
