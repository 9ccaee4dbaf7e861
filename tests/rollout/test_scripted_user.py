"""Users that play a script: what they say when, what ends it, and scripts that are refused."""

import asyncio
import re

import pytest

from turnwise.config import Config, RolloutConfig
from turnwise.errors import ConfigError
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.users.loading import Users
from turnwise.rollout.users.scripted import ScriptedUser, is_like, read_turns
from turnwise.types import InteractionSpec, StopReason

SHOPPER = """
turns:
  - {when: {right: true}, say: "Thanks, {person}!", end: true, score: right}
  - {when: {lacks: "####"}, say: "Please end with ####.", times: 2, score: 0.1}
  - {when: {called: false, answers: 2}, say: "Use the calculator."}
  - {say: "No. Try again.", times: null, score: right}
"""


@pytest.fixture
def shopper(tmp_path):
    path = tmp_path / "user.yaml"
    path.write_text(SHOPPER)
    return {"interaction": "scripted", "interaction_kwargs": {"file": str(path)}}


def test_conditions_choose_what_is_said_and_what_an_answer_is_worth(rollouts, sample, call, shopper):
    said = ["Hm.", "#### 41", "#### 40", call("calculate", expression="6*7"), "<think>#### 41</think>#### 42"]
    one = sample(info={"interaction_kwargs": {"person": "Ada"}})
    rollout = rollouts.make(said, samples=[one], tools=[calculate], **shopper)
    trajectory = rollout.play()
    assert [turn.replies[-1].text for turn in trajectory.turns[:-1]] == [
        "Please end with ####.",
        "Use the calculator.",
        "No. Try again.",
        "42",
    ]
    assert [turn.user_score for turn in trajectory.turns] == [0.1, None, 0.0, None, 1.0]
    assert trajectory.stop_reason is StopReason.USER_ENDED and trajectory.facts.user_score == 1.0
    assert trajectory.facts.user_notes[-1] == {"script_turn": 0, "said": "Thanks, Ada!"}
    rollout.check_tokens(trajectory)


def test_a_row_brings_a_script_of_its_own(rollouts, sample):
    turns = [{"say": "And {topic}?", "when": {"contains": ["seven", "SIX"]}}, {"say": "Well?"}]
    one = sample(interaction=InteractionSpec("scripted", {"turns": turns, "topic": "eight"}))
    trajectory = rollouts.make(["Six.", "So?", "Nothing."], samples=[one]).play()
    assert [turn.replies[0].text for turn in trajectory.turns[:-1]] == ["And eight?", "Well?"]
    assert trajectory.stop_reason is StopReason.USER_ENDED and trajectory.turns[-1].replies == []
    assert trajectory.facts.user_notes[-1] == {"script_turn": None}, "nothing was left to say"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"turns": [{"sya": "a"}]}, r"interaction_kwargs.turns\[0\]: unknown key 'sya': did you mean 'say'"),
        ({}, "has no script"),
        ({"turns": [{"say": "{order}"}], "oder": "a"}, "which interaction_kwargs lacks: did you mean 'oder'"),
        ({"turns": [{"say": "It is {ground_truth}."}]}, "which interaction_kwargs lacks"),
    ],
)
def test_a_row_that_cannot_be_played_fails_alone(rollouts, sample, kwargs, words):
    one = sample(interaction=InteractionSpec("scripted", kwargs))
    rollout = rollouts.make(["Hm."], samples=[one])
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.FAILED
    assert re.search(words, trajectory.failure), trajectory.failure


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([], "a non-empty list"),
        ("say", "a non-empty list"),
        ([3], r"turns\[0\]: .*dictionary"),
        ([{}], r"set say \(a text\), or end: true"),
        ([{"say": "a", "when": {"contain": "b"}}], "unknown key 'contain': did you mean 'contains'"),
        ([{"say": "a", "times": 0}], r"turns\[0\].times: .*greater than or equal to 1"),
        ([{"say": "a", "end": "yes"}], r"turns\[0\].end: .*valid boolean"),
        ([{"say": "a", "score": float("nan")}], r"turns\[0\].score"),
        ([{"say": "a"}] * 1001, "at most 1000"),
    ],
)
def test_wrong_scripts_are_refused_with_their_place(turns, words):
    with pytest.raises(ConfigError, match=words):
        read_turns(turns, "turns")


def test_wrong_options_are_refused_before_the_run(tmp_path):
    def make(**kwargs):
        return Users(Config(rollout=RolloutConfig(interaction="scripted", interaction_kwargs=kwargs))).get("scripted")

    with pytest.raises(ConfigError, match="interaction scripted: unknown option 'flie': did you mean 'file'"):
        make(flie="a")
    with pytest.raises(ConfigError, match="no file absent.yaml"):
        make(file="absent.yaml")
    with pytest.raises(ConfigError, match="unknown right_by 'gsm9k': did you mean 'gsm8k'"):
        make(turns=[{"say": "a"}], right_by="gsm9k")
    (tmp_path / "a.yaml").write_text("turn: []")
    with pytest.raises(ConfigError, match="expected one key, 'turns'"):
        make(file=str(tmp_path / "a.yaml"))


def test_patterns_are_plain_and_take_linear_time():
    assert is_like("your order a12 is ready.", "*order * is ready*") and is_like("a", "a") and is_like("", "*")
    assert not is_like("ab", "ab*b") and not is_like("a b", "ab") and is_like("xaxbx", "*a*b*")
    assert not is_like("a" * 100_000, "*a" * 200 + "b")


def test_no_ground_truth_fails_the_episode_by_name(rollouts, sample):
    one = sample(ground_truth=None)
    turns = [{"when": {"right": True}, "say": "Yes.", "end": True}]
    rollout = rollouts.make(["#### 1"], samples=[one], interaction="scripted", interaction_kwargs={"turns": turns})
    trajectory = rollout.play()
    assert "interaction 'scripted': reply: DataError" in trajectory.failure


def test_many_episodes_share_one_script(rollouts, sample, shopper):
    samples = [sample(f"t:{n}", info={"interaction_kwargs": {"person": "P"}}) for n in range(20)]
    rollout = rollouts.make(["#### 1", "#### 42"], samples=samples, **shopper)

    async def play():
        return await asyncio.gather(*(rollout.episode(n) for n in range(20)))

    assert {one.facts.user_score for one in asyncio.run(play())} == {1.0}
    assert isinstance(rollout.context.users.get("scripted"), ScriptedUser)
