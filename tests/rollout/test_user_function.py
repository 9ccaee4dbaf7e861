"""A simulated user of one's own: a function, a class, and what is refused in one sentence."""

import pytest
from scripted_rollout import make_sample

from turnwise.config import Config, RolloutConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.ext import table
from turnwise.extensions import Extension
from turnwise.rollout.tools.calculate import calculate
from turnwise.rollout.users.loading import Users
from turnwise.rollout.users.user import Reply
from turnwise.types import InteractionSpec, StopReason

ME = __name__


async def patient(turn, *, patience: int = 1):
    """Asks again so often, then leaves."""
    return Reply("Sure?", score=0.5, note={"number": turn.number}) if turn.number <= patience else None


def plain(turn):
    """A plain function is run in a thread."""
    return Reply(end=True, score=1.0)


async def reads_tools(turn):
    results = [turn.result(record) for record in turn.calls]
    return Reply(f"The tool said {results}.") if turn.number == 1 else None


async def wrong(turn):
    return 3


def test_text_reply_and_none(rollouts):
    rollout = rollouts.make(["a", "b", "c"], interaction=f"{ME}:patient", interaction_kwargs={"patience": 2})
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.USER_ENDED and len(trajectory.turns) == 3
    assert [turn.user_score for turn in trajectory.turns] == [0.5, 0.5, None]
    assert trajectory.facts.user_score == 0.5 and trajectory.facts.user_notes == [{"number": 1}, {"number": 2}]


def test_a_plain_function_is_taken(rollouts):
    trajectory = rollouts.make(["a"], interaction=f"{ME}:plain").play()
    assert trajectory.stop_reason is StopReason.USER_ENDED and trajectory.facts.user_score == 1.0


def test_it_sees_what_tools_did(rollouts, call):
    said = [call("calculate", expression="6*7"), "So?", "Bye."]
    trajectory = rollouts.make(said, tools=[calculate], interaction=f"{ME}:reads_tools").play()
    assert trajectory.turns[1].replies[0].text == "The tool said ['42']."


def test_a_wrong_return_fails_the_episode_in_one_sentence(rollouts):
    trajectory = rollouts.make(["a"], interaction=f"{ME}:wrong").play()
    assert trajectory.failure == f"interaction '{ME}:wrong' returned 3, not text, a turnwise.Reply, or None to end"


def test_wrong_options_and_what_is_no_user_are_refused_before_the_run():
    with pytest.raises(ConfigError, match="unknown option 'patienc': did you mean 'patience'"):
        Users(Config(rollout=RolloutConfig(interaction=f"{ME}:patient", interaction_kwargs={"patienc": 1}))).get(
            f"{ME}:patient"
        )
    with pytest.raises(PluginError, match="is not a user: write async def user"):
        Users(Config(rollout=RolloutConfig(interaction=f"{ME}:ME"))).get(f"{ME}:ME")


def test_an_extension_brings_users_by_name(rollouts, monkeypatch):
    brought = {**table.OURS, "shop": Extension(users={"shopper": f"{ME}:patient"})}
    monkeypatch.setattr(table, "OURS", brought)
    assert "shopper" in Users(Config()).names
    rollout = rollouts.make(["a", "b", "c"], interaction="shopper", interaction_kwargs={"patience": 2})
    assert len(rollout.play().turns) == 3
    rows = [make_sample(interaction=InteractionSpec("shopper"))]
    assert len(rollouts.make(["a", "b", "c"], samples=rows).play().turns) == 2
    with pytest.raises(PluginError, match="did you mean 'shopper'"):
        Users(Config()).get("shoper")


def test_an_extension_brings_no_user_of_a_name_that_is_taken(monkeypatch):
    monkeypatch.setattr(table, "OURS", {"shop": Extension(users={"gsm8k": f"{ME}:patient"})})
    with pytest.raises(PluginError, match="'gsm8k' in its users is already used by Turnwise itself"):
        Users(Config()).get("gsm8k")
