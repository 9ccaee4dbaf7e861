"""verl's interactions as simulated users: the registry, classes as they are, errors that stay with their episode."""

import asyncio
import os
import threading
from typing import ClassVar

import numpy as np
import pytest

from turnwise.config import Config, RolloutConfig
from turnwise.config.sections import with_value
from turnwise.errors import ConfigError, PluginError
from turnwise.ext.verl.users import BaseInteraction
from turnwise.rollout.users.loading import Users
from turnwise.types import EpisodeFacts, InteractionSpec, Message, Role, StopReason

ME = __name__


# --- the registry -------------------------------------------------------------------------------------------------

MODULE = """
class PoliteInteraction:
    def __init__(self, config):
        self.config = config
    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, self.config.get("word", "thanks"), 1.0, {}
    async def calculate_score(self):
        return 0.75
    async def finalize_interaction(self):
        pass

class Half:
    def __init__(self, config): pass
    async def generate_response(self, *args, **kwargs): pass

class Broken(PoliteInteraction):
    def __init__(self, config):
        raise FileNotFoundError("no model there")

number = 3
"""


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Writes a registry, beside a module of its own, and makes the command run elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "config"
    folder.mkdir()
    name = f"polite_{tmp_path.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(elsewhere)

    def write(text, *, relative=False):
        path = folder / "interactions.yaml"
        path.write_text(text.replace("MODULE", name))
        return os.path.relpath(path) if relative else path

    return write


def interactions(path, **settings):
    config = Config(rollout=RolloutConfig(**settings))
    return Users(with_value(config, "verl.interactions_file", str(path)))


def test_classes_beside_the_yaml_are_found_from_another_folder(registry):
    path = registry(
        "interaction:\n  - class_name: MODULE.PoliteInteraction\n    config: {word: merci}\n", relative=True
    )
    found = interactions(path)
    assert "polite" in found.names, "the class name without Interaction, in lower case"
    made = found.get("polite").interaction
    assert made.config == {"word": "merci", "name": "polite"}
    assert found.get("polite").interaction is made, "one instance serves the run"


def test_a_name_of_ones_own_and_options_of_the_command_line(registry):
    path = registry(
        "interaction:\n  - name: teacher\n    class_name: MODULE.PoliteInteraction\n    config: {word: a}\n"
    )
    made = interactions(path, interaction="teacher", interaction_kwargs={"word": "b"}).get("teacher").interaction
    assert made.config == {"word": "b", "name": "teacher"}


def test_two_names_for_one_class_are_two_instances(registry):
    entry = "  - {name: NAME, class_name: MODULE.PoliteInteraction}\n"
    path = registry("interaction:\n" + entry.replace("NAME", "a") + entry.replace("NAME", "b"))
    found = interactions(path)
    assert found.get("a").interaction is not found.get("b").interaction


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("interaction: [", ConfigError, "not YAML"),
        ("", ConfigError, "non-empty list under the key 'interaction'"),
        ("interactions: []", ConfigError, "non-empty list"),
        ("interaction: {}", ConfigError, "non-empty list"),
        ("interaction:\n  - name: x\n", ConfigError, r"interaction\[0\] needs a class_name"),
        ("interaction:\n  - text\n", ConfigError, r"interaction\[0\] needs a class_name"),
        ("interaction:\n  - {class_name: MODULE.PoliteInteraction, confg: {}}\n", ConfigError,
         "unknown key 'confg': did you mean 'config'"),
        ("interaction:\n  - {class_name: MODULE.PoliteInteraction, config: [1]}\n", ConfigError,
         "config must be a mapping"),
        ("interaction:\n  - {class_name: MODULE.PoliteInteraction, name: 3}\n", ConfigError, "name must be text"),
        ("interaction:\n  - {class_name: MODULE.PoliteInteraction}\n  - {class_name: MODULE.PoliteInteraction}\n",
         ConfigError, r"interaction\[1\]: the name 'polite' is taken"),
        ("interaction:\n  - {class_name: MODULE.PoliteInteractoin}\n", PluginError, "did you mean 'PoliteInteraction'"),
        ("interaction:\n  - {class_name: nowhere.Class}\n", PluginError, "no module 'nowhere'"),
        ("interaction:\n  - {class_name: MODULE.number}\n", PluginError, "3 is not a class"),
        ("interaction:\n  - {class_name: MODULE.Half}\n", PluginError,
         "Half has no start_interaction, calculate_score, finalize_interaction"),
    ],
)  # fmt: skip
def test_wrong_registries_are_refused_with_their_place(registry, text, error, words):
    with pytest.raises(error, match=words):
        interactions(registry(text))


def test_a_missing_file_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no file absent.yaml .from {tmp_path}"):
        interactions("absent.yaml")


def test_a_constructor_that_fails_is_the_authors_to_mend(registry):
    found = interactions(registry("interaction:\n  - {class_name: MODULE.Broken}\n"))
    with pytest.raises(PluginError, match=r"Broken\(config\) failed: FileNotFoundError\('no model there'\)"):
        found.get("broken")


# --- verl's classes -----------------------------------------------------------------------------------------------


class VerlStyle:
    """As in verl's base class: two methods without an instance id, state keyed by id, everything async."""

    def __init__(self, config):
        self.config = config
        self.states = {}
        self.finalised = 0
        self.given = []

    async def start_interaction(self, instance_id=None, **kwargs):
        self.given.append(kwargs)
        self.states[instance_id] = kwargs["ground_truth"]
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.given.append(kwargs)
        kwargs.get("seen", []).append(instance_id)
        right = self.states[instance_id] in messages[-1]["content"]
        return right, "Try again.", float(right), {"length": len(messages)}

    async def calculate_score(self):
        return 0.5

    async def finalize_interaction(self):
        self.finalised += 1


class Sync(VerlStyle):
    """Every method is an ordinary function, which may block."""

    def start_interaction(self, instance_id=None, **kwargs):
        self.states[instance_id] = threading.get_ident()

    def generate_response(self, instance_id, messages):
        assert threading.current_thread() is not threading.main_thread()
        return [True, "bye", np.float32(0.25), None]

    def calculate_score(self, instance_id):
        return np.int64(2)

    def finalize_interaction(self, instance_id, **kwargs):
        del self.states[instance_id]


class NamesItsOwn(VerlStyle):
    """Ignores the id it is given."""

    async def start_interaction(self, instance_id=None, **kwargs):
        identity = f"mine-{len(self.states)}"
        self.states[identity] = "42"
        return identity

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.states[instance_id]


def user_show(rollouts, kind, said=("#### 42",), **settings):
    return rollouts.make(list(said), interaction=f"{ME}:{kind}", **settings)


def test_methods_without_arguments_are_called_without(rollouts, sample):
    rollout = user_show(rollouts, "VerlStyle", ["no", "#### 42"])
    trajectory = rollout.play()
    made = rollout.context.users.get(f"{ME}:VerlStyle").interaction
    assert trajectory.stop_reason is StopReason.USER_ENDED and trajectory.failure is None
    assert made.finalised == 1
    assert trajectory.facts == EpisodeFacts(user_score=0.5, user_notes=[{"length": 3}, {"length": 5}])
    assert [turn.user_score for turn in trajectory.turns] == [0.0, 1.0]


def test_kwargs_are_passed_with_name_query_and_ground_truth(rollouts, sample):
    spec = InteractionSpec(f"{ME}:VerlStyle", {"level": 3, "query": "the row's", "method": "x", "seconds": 1})
    samples = [
        sample("a", interaction=spec),
        sample("b", info={"interaction_kwargs": {"level": 4}}),
    ]
    rollout = user_show(rollouts, "VerlStyle", samples=samples)
    assert rollout.play(0).failure is None and rollout.play(1).failure is None
    given = rollout.context.users.get(f"{ME}:VerlStyle").interaction.given
    first = {"name": f"{ME}:VerlStyle", "level": 3, "query": "the row's", "ground_truth": "42"}
    second = {"name": f"{ME}:VerlStyle", "level": 4, "query": "What is 6 times 7?", "ground_truth": "42"}
    assert given == [{**first, "method": "x", "seconds": 1}] * 2 + [second] * 2


def test_synchronous_methods_run_apart_and_return_what_they_like(rollouts):
    rollout = user_show(rollouts, "Sync")
    trajectory = rollout.play()
    assert trajectory.failure is None
    assert trajectory.turns[0].user_score == 0.25
    assert trajectory.facts == EpisodeFacts(user_score=2.0)
    assert rollout.context.users.get(f"{ME}:Sync").interaction.states == {}


def test_an_interaction_may_choose_its_own_ids(rollouts):
    rollout = user_show(rollouts, "NamesItsOwn")
    assert rollout.play().stop_reason is StopReason.USER_ENDED
    assert rollout.context.users.get(f"{ME}:NamesItsOwn").interaction.states == {}


def test_state_under_the_instance_never_leaks_between_siblings(rollouts, sample):
    """Each sibling has its own copy of the row's kwargs, and is asked about its own answer."""
    spec = InteractionSpec(f"{ME}:VerlStyle", {"seen": []})
    chosen = sample("a", interaction=spec)

    def script(request):
        return f"#### {request.turn + 42 - request.noise.sibling}"

    rollout = rollouts.make(script, samples=[chosen], interaction=spec.name)
    group = asyncio.run(rollout.group(4))
    assert [len(t.turns) for t in group.trajectories] == [1, 2, 3, 4]
    assert spec.kwargs == {"seen": []}
    for trajectory in group.trajectories:
        assert [turn.user_score for turn in trajectory.turns] == [0.0] * trajectory.sibling + [1.0]


class Odd(BaseInteraction):
    """Returns what the sample asks for."""

    live: ClassVar = {}

    async def start_interaction(self, instance_id=None, **kwargs):
        self.live[instance_id] = kwargs
        return kwargs.get("start", instance_id)

    async def generate_response(self, instance_id, messages, **kwargs):
        if kwargs.get("raise"):
            raise KeyError("lost")
        return kwargs.get("value", (True, "bye", 1.0, {}))

    async def calculate_score(self, instance_id, **kwargs):
        return self.live[instance_id].get("score")

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.live[instance_id]


WRONG = [
    ({"value": None}, "generate_response returned None, not"),
    ({"value": "bye"}, "generate_response returned 'bye', not"),
    ({"value": (True, "bye", 1.0)}, "should_terminate: bool, text: str"),
    ({"value": (True, "bye", 1.0, {}, 5)}, "should_terminate: bool"),
    ({"value": ("yes", "bye", 1.0, {})}, "should_terminate: bool"),
    ({"value": (1, "bye", 1.0, {})}, "should_terminate: bool"),
    ({"value": (True, None, 1.0, {})}, "should_terminate: bool"),
    ({"value": (True, b"bye", 1.0, {})}, "should_terminate: bool"),
    ({"value": (True, "bye", "good", {})}, "a finite number or None"),
    ({"value": (True, "bye", float("nan"), {})}, "a finite number or None"),
    ({"value": (True, "bye", float("inf"), {})}, "a finite number or None"),
    ({"value": (True, "bye", 10**400, {})}, "a finite number or None"),
    ({"value": (True, "bye", 1.0, "extra")}, "a dict of JSON values"),
    ({"value": (True, "bye", 1.0, {"a": object()})}, "not a dict of JSON values"),
    ({"value": (False, "x" * 500_001, None, {})}, "returned 500001 characters, not at most 500000"),
    ({"raise": True}, "generate_response: KeyError: 'lost'"),
    ({"score": "good"}, "score returned 'good', not"),
    ({"start": 7}, "start_interaction returned 7, not"),
    ({"start": ""}, "start_interaction returned '', not"),
]


@pytest.mark.parametrize(
    ("kwargs", "words"), WRONG, ids=[str(kwargs).partition(" at 0x")[0][:80] for kwargs, _ in WRONG]
)
def test_wrong_returns_fail_their_episode_only(rollouts, sample, kwargs, words):
    spec = InteractionSpec(f"{ME}:Odd", kwargs)
    samples = [sample("good", interaction=InteractionSpec(f"{ME}:Odd")), sample("bad", interaction=spec)]
    rollout = rollouts.make(["#### 42"], samples=samples, interaction=spec.name)

    async def both():
        return await asyncio.gather(rollout.episode(0), rollout.episode(1))

    good, bad = asyncio.run(both())
    assert (good.stop_reason, good.failure) == (StopReason.USER_ENDED, None)
    assert bad.stop_reason is StopReason.FAILED
    assert bad.failure.startswith(f"interaction '{ME}:Odd'") and words in bad.failure
    assert bad.answers == [] or bad.answers[-1].text == "#### 42"
    assert Odd.live == {}


@pytest.mark.parametrize("value", [(True, "bye", None, None), (True, "bye", True, {}), [True, "bye", 1, {}]])
def test_right_returns_of_many_kinds(rollouts, sample, value):
    samples = [sample("a", interaction=InteractionSpec(f"{ME}:Odd", {"value": value}))]
    trajectory = rollouts.make(["x"], samples=samples, interaction=f"{ME}:Odd").play()
    assert trajectory.stop_reason is StopReason.USER_ENDED


def test_what_a_user_says_is_made_fit_for_tokenizers(rollouts, sample):
    value = (False, "half \ud800 and nul \x00", None, {})
    samples = [sample("a", interaction=InteractionSpec(f"{ME}:Odd", {"value": value}))]
    rollout = rollouts.make(["x"], samples=samples, max_assistant_turns=2, interaction=f"{ME}:Odd")
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert trajectory.turns[0].replies == [
        Message(Role.USER, "half \N{REPLACEMENT CHARACTER} and nul \N{REPLACEMENT CHARACTER}")
    ]


def test_an_extra_that_is_changed_later_is_recorded_as_it_was(rollouts, sample):
    extra = {"list": [1]}
    samples = [sample("a", interaction=InteractionSpec(f"{ME}:Odd", {"value": (True, "bye", None, extra)}))]
    trajectory = rollouts.make(["x"], samples=samples, interaction=f"{ME}:Odd").play()
    extra["list"].append(2)
    assert trajectory.facts.user_notes == [{"list": [1]}]


def test_the_base_class_never_answers_by_itself(rollouts):
    rollout = rollouts.make(["x"], interaction="turnwise.ext.verl.users:BaseInteraction")
    assert "must implement generate_response" in rollout.play().failure
