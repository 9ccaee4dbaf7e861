"""Gymnasium environments: real ones and one of words, closed on every path, siblings alike where wanted."""

import asyncio
import sys
import threading

import pytest

from turnwise.config import Config, RolloutConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.ext.gym.loop import GymOptions, NoAction, read_action
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.users.loading import Users
from turnwise.types import StopReason

gymnasium = pytest.importorskip("gymnasium")
ME = f"{__file__}:{{}}"
MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
LAKE = {"env": "FrozenLake-v1", "env_kwargs": {"is_slippery": False, "render_mode": "ansi"}, "actions": MOVES}


class Echo(gymnasium.Env):
    """Wants its word said backwards; half a point for a try."""

    made: list["Echo"] = []  # noqa: RUF012

    def __init__(self, trouble=""):
        self.observation_space = self.action_space = gymnasium.spaces.Text(max_length=20)
        self.trouble, self.closed, self.gate = trouble, 0, threading.Event()
        sys.modules[type(self).__module__].Echo.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = (options or {}).get("word") or "".join(self.np_random.choice(list("abcdefgh"), 5))
        return f"Say {self.word} backwards.", {}

    def step(self, action):
        if self.trouble == "step":
            raise ZeroDivisionError("a bug of its own")
        if self.trouble == "hang":
            self.gate.wait(20)
        if self.trouble == "nan":
            return "x", float("nan"), False, False, {}
        right = action == self.word[::-1]
        return ("Yes." if right else "No."), 1.0 if right else 0.5, right, False, {}

    def close(self):
        self.closed += 1


def hand(observation, env):
    """Blackjack in words."""
    mine, dealer, ace = observation
    return f"You have {mine}{' with an ace' if ace else ''}; the dealer shows {dealer}. Action: stick or hit?"


def odd(answer, env):
    if "go" not in answer:
        raise ValueError("Say go.")
    return 1


def play(rollout):
    return asyncio.run(rollout.episode())


def with_env(options, **settings):
    return {"agent": "gym_env", "agent_options": options, **settings}


def echoes():
    module = next(
        one for one in sys.modules.values() if getattr(one, "__file__", None) == __file__ and one.__name__ != __name__
    )
    return module.Echo.made


def test_frozen_lake_in_its_own_words(rollouts):
    way = ["down", "down", "right", "right", "down", "right"]
    said = ["I do not know.", *(f"<think>Action: up</think>I go on.\nAction: {one}." for one in way)]
    rollout = rollouts.make(said, **with_env(LAKE))
    trajectory = play(rollout)
    record = trajectory.facts.environment
    assert trajectory.failure is None and record.reward == 1.0 and record.finished
    assert record.metrics == {"no_action": 1.0, "steps": 6.0, "terminated": 1.0, "truncated": 0.0}
    assert trajectory.messages[1].text.startswith("What is 6 times 7?\n\n") and "[S]FFF" in trajectory.messages[1].text
    assert "one of left, down, right, up" in trajectory.turns[0].replies[0].text
    assert [turn.user_score for turn in trajectory.turns] == [None, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    rollout.check_tokens(trajectory)


def test_blackjack_described_by_a_function_starts_alike_for_siblings(rollouts, sample):
    options = {"env": "Blackjack-v1", "describe": ME.format("hand"), "actions": {"stick": 0, "hit": 1}}

    def firsts(**more):
        rollout = rollouts.make(
            ["Action: stick"], samples=[sample(f"t:{n}") for n in range(6)], **with_env(options | more)
        )

        async def all_of_them():
            return await asyncio.gather(*(rollout.episode(n, sibling) for n in range(6) for sibling in range(3)))

        found = asyncio.run(all_of_them())
        assert all(one.failure is None and one.facts.environment.finished for one in found)
        return [[one.messages[1].text for one in found[at : at + 3]] for at in range(0, 18, 3)]

    alike = firsts()
    assert all(len(set(texts)) == 1 for texts in alike) and len({texts[0] for texts in alike}) > 1
    assert alike == firsts(), "the same when played again"
    assert any(len(set(texts)) > 1 for texts in firsts(seed="episode"))


def test_an_environment_of_words_sums_its_rewards_and_takes_options_of_the_row(rollouts, sample):
    one = sample(info={"extra_info": {"reset_options": {"word": "abc"}}})
    rollout = rollouts.make(["cab", "Action: cba"], samples=[one], **with_env({"env": ME.format("Echo")}))
    trajectory = play(rollout)
    assert trajectory.facts.environment.reward == 1.5 and trajectory.failure is None
    assert "Say abc backwards." in trajectory.messages[1].text and echoes()[-1].closed == 1


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("step", "gym_env: step of .*: ZeroDivisionError: a bug of its own"),
        ("nan", "gave the reward nan"),
        ("hang", "took longer than 0.2 s"),
    ],
)
def test_trouble_of_the_environment_fails_the_episode_and_it_is_closed(rollouts, trouble, words, monkeypatch):
    monkeypatch.setattr("turnwise.ext.gym.loop.CLOSE_SECONDS", 0.1)
    options = {"env": ME.format("Echo"), "env_kwargs": {"trouble": trouble}}
    options |= {"timeout": 0.2} if trouble == "hang" else {}
    trajectory = play(rollouts.make(["a"], **with_env(options)))
    assert trajectory.stop_reason is StopReason.FAILED
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(trajectory.failure)
    made = echoes()[-1]
    made.gate.set()
    if trouble == "hang":
        assert "still at work" in trajectory.facts.environment.left_open, "never closed under its step"
        assert made.closed == 0
    else:
        assert made.closed == 1


def test_an_environment_is_closed_when_its_episode_is_cancelled(rollouts):
    async def main():
        rollout = rollouts.make(["a"], **with_env({"env": ME.format("Echo")}))
        rollout.sampler.hang_at = 0
        episode = asyncio.ensure_future(rollout.episode())
        await rollout.sampler.generating.wait()
        episode.cancel()
        await asyncio.wait((episode,))
        return episode.cancelled()

    assert asyncio.run(main()) and echoes()[-1].closed == 1


def test_what_gives_no_text_and_what_is_not_registered_stops_the_run(rollouts):
    with pytest.raises(PluginError, match="gives no text .*render_mode: ansi"):
        play(rollouts.make(["1"], **with_env({"env": "FrozenLake-v1"})))
    with pytest.raises(ConfigError, match="unknown environment 'FrozenLak-v1': did you mean 'FrozenLake"):
        play(rollouts.make(["1"], **with_env({"env": "FrozenLak-v1"})))
    with pytest.raises(PluginError, match="is not a Gymnasium environment"):
        play(rollouts.make(["1"], **with_env({"env": "builtins:dict"})))


def test_actions_are_read_from_the_last_mark_or_from_all_that_is_said():
    five = gymnasium.spaces.Discrete(5, start=1)
    assert read_action("Action: 2\nno: Action: 5", five, None) == 5 and read_action(" 3 ", five, None) == 3
    assert read_action("**Action: Up**", gymnasium.spaces.Discrete(4), {"up": 3}) == 3
    for wrong in ("0", "6", "-1", "", "Action: two", "9" * 5000, "²"):
        with pytest.raises(NoAction, match="a number from 1 to 5"):
            read_action(wrong, five, None)
    with pytest.raises(NoAction, match="no action"):
        read_action("x" * 30, gymnasium.spaces.Text(20), None)
    with pytest.raises(PluginError, match="set rollout.agent_options.actions"):
        read_action("1", gymnasium.spaces.Box(0, 1), None)


def test_a_function_reads_actions(rollouts):
    options = {**LAKE, "actions": ME.format("odd")}
    trajectory = play(rollouts.make(["stay", "go", "go"], max_assistant_turns=3, **with_env(options)))
    assert trajectory.turns[0].replies[0].text == "Say go."
    assert trajectory.facts.environment.metrics["steps"] == 2.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs rollout.agent_options={env"),
        ({"env": "a", "sed": "b"}, "agent loop 'gym_env': unknown option 'sed': did you mean 'seed'"),
        ({"env": "a", "seed": "b"}, "seed: Input should be 'sample'"),
        ({"env": "a", "timeout": 0}, "timeout: Input should"),
    ],
)
def test_wrong_options_are_refused_before_the_run(sample, options, words):
    config = RolloutConfig(agent="gym_env", agent_options=options)
    with pytest.raises(ConfigError, match=words):
        Plan([sample()], Config(rollout=config), Toolbox([], config), Users(Config(rollout=config)))
    assert GymOptions.of(LAKE).actions == MOVES
