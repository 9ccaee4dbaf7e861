"""The built-in users: gsm8k says right or wrong and never the answer, code_verify doubts as often as it is told to."""

import asyncio

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from turnwise.config import Config, RolloutConfig
from turnwise.errors import ConfigError, EpisodeError, PluginError
from turnwise.rollout.users.code_verify import FEEDBACK, TERMINATE, code_verify
from turnwise.rollout.users.gsm8k import LAST_TRY, NO_ANSWER, RIGHT, WRONG, gsm8k, wrong_step
from turnwise.rollout.users.loading import Users
from turnwise.rollout.users.user import UserTurn
from turnwise.types import InteractionSpec, Message, Role, Sample, StopReason

WORDS = st.text(max_size=60)
NUMBERS = st.one_of(st.integers(-(10**6), 10**6).map(str), st.decimals(allow_nan=False, allow_infinity=False).map(str))


def ask(user, truth, answers, **options):
    """What the user replies to each answer."""

    async def main():
        question = Message(Role.USER, f"The answer is {truth}. What is it?")
        messages, own, replies = [question], [], []
        for number, answer in enumerate(answers, 1):
            own.append(Message(Role.ASSISTANT, answer))
            messages.append(own[-1])
            turn = UserTurn(
                Sample("s", (question,), "test", truth),
                tuple(messages),
                tuple(own),
                (),
                number,
                {"ground_truth": truth},
            )
            replies.append(await user(turn, **options))
            messages.append(Message(Role.USER, replies[-1].text))
        return replies

    return asyncio.run(main())


@given(truth=NUMBERS, answers=st.lists(st.one_of(WORDS, NUMBERS.map(lambda n: f"so #### {n}")), min_size=1, max_size=4))
def test_gsm8k_never_tells_the_answer(truth, answers):
    """Its words are one of two fixed texts, so nothing about the truth but right or wrong is in them."""
    for reply in ask(gsm8k, truth, answers):
        assert reply.text == (RIGHT if reply.end else WRONG)
        assert reply.score == float(reply.end)
        assert reply.note is None


@given(one=NUMBERS, other=NUMBERS, answer=WORDS)
def test_gsm8k_says_the_same_whatever_the_truth_when_the_answer_is_wrong(one, other, answer):
    assume(f"#### {one}" not in answer and f"#### {other}" not in answer and "####" not in answer)
    assert ask(gsm8k, one, [answer]) == ask(gsm8k, other, [answer])


@pytest.mark.parametrize(
    ("answer", "right"),
    [("#### 42", True), ("#### 4,2", True), ("####42", False), ("42", False), ("#### 41 #### 42", True),
     ("#### 42 or #### 41", False), ("#### 42.", False), ("#### 42" + "x" * 300, False)],
)  # fmt: skip
def test_gsm8k_judges_by_verls_strict_rule(answer, right):
    assert ask(gsm8k, "42", [answer])[0].end is right


def test_gsm8k_needs_a_ground_truth(rollouts, sample):
    rollout = rollouts.make(["#### 42"], interaction="gsm8k", samples=[sample(ground_truth=None)])
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.FAILED
    assert "needs interaction_kwargs.ground_truth" in trajectory.failure
    with pytest.raises(EpisodeError):
        ask(gsm8k, None, ["#### 42"])


def test_gsm8k_in_an_episode(rollouts):
    rollout = rollouts.make(["#### 41", "#### 42"], interaction="gsm8k")
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.USER_ENDED
    assert [turn.user_score for turn in trajectory.turns] == [0.0, 1.0]
    assert trajectory.facts.user_score == 1.0


def test_gsm8k_keeps_many_episodes_apart(rollouts, sample):
    samples = [sample(f"s{n}", ground_truth=str(n)) for n in range(20)]
    rollout = rollouts.make(lambda r: f"#### {r.turn}", interaction="gsm8k", samples=samples, max_assistant_turns=9)

    async def main():
        return await asyncio.gather(*(rollout.episode(n) for n in range(20)))

    trajectories = asyncio.run(main())
    assert [len(t.turns) for t in trajectories] == [min(n + 1, 9) for n in range(20)]


def made(name, **options):
    return Users(Config(rollout=RolloutConfig(interaction=name, interaction_kwargs=options))).get(name)


def test_gsm8k_has_no_option_to_tell():
    with pytest.raises(ConfigError, match="interaction gsm8k: unknown option 'tell': valid: hints, tries"):
        made("gsm8k", tell=True)


@pytest.mark.parametrize("times", [0, 1, 3])
def test_code_verify_doubts_as_often_as_told(rollouts, times):
    rollout = rollouts.make(["#### 42"], interaction="code_verify", interaction_kwargs={"max_turns": times})
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.USER_ENDED
    assert [m.text for turn in trajectory.turns for m in turn.replies] == [FEEDBACK] * times
    assert len(trajectory.turns) == times + 1
    assert [turn.user_score for turn in trajectory.turns] == [None] * (times + 1)


def test_code_verify_says_what_it_is_told_to_say():
    replies = ask(code_verify, "1", ["a", "b", "c"], feedback_message="Hm?", terminate_message="Ok.", max_turns=2)
    assert [(reply.end, reply.text) for reply in replies] == [(False, "Hm?"), (False, "Hm?"), (True, "Ok.")]
    assert [reply.note for reply in replies] == [{"asked": 1}, {"asked": 2}, None]
    assert {reply.score for reply in replies} == {None}
    last = ask(code_verify, "1", ["a", "b"])[1]
    assert (last.end, last.text) == (True, TERMINATE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_turns": -1}, "max_turns=-1 does not fit: Input should be greater than or equal to 0"),
        ({"max_turns": "2"}, "max_turns='2' does not fit: Input should be a valid integer"),
        ({"max_turns": True}, "max_turns=True does not fit"),
        ({"feedback_message": 3}, "feedback_message=3 does not fit: Input should be a valid string"),
        ({"feedback": "x"}, "did you mean 'feedback_message'"),
    ],
)
def test_code_verify_refuses_wrong_options(options, words):
    with pytest.raises(ConfigError, match=words):
        made("code_verify", **options)


def test_gsm8k_with_hints_tells_what_is_missing_and_never_the_answer(rollouts, sample):
    said = ["It is 42.", "6*7=41 so #### 41", "#### 41", "#### $42.00"]
    hints = {"interaction": "gsm8k", "interaction_kwargs": {"hints": True, "tries": 4}}
    trajectory = rollouts.make(said, samples=[sample()], **hints).play()
    replies = [turn.replies[0].text for turn in trajectory.turns if turn.replies]
    assert replies[0] == NO_ANSWER and "The step 6*7=41 is not right" in replies[1]
    assert replies[2] == WRONG + LAST_TRY and not any("42" in reply for reply in replies)
    assert trajectory.facts.user_score == 1.0 and trajectory.stop_reason is StopReason.USER_ENDED
    given_up = rollouts.make(["#### 1"], samples=[sample()], **hints).play()
    assert len(given_up.turns) == 4 and given_up.facts.user_score == 0.0


@pytest.mark.parametrize(
    ("answer", "step"),
    [
        ("3*4=12, 12+1=13", None),
        ("<<3*4=13>>13 and 2+2=5", "3*4=13"),
        ("10/3=3.33", None),
        ("10 ÷ 3 = 3.4", "10 ÷ 3 = 3.4"),
        ("1/0=3", "1/0=3"),
        ("1+2+3=6", None),
        ("5 - 7 = -2", None),
        ("2 × 3 = $6", None),
        ("9" * 20_000 + "*1=1", None),
    ],
)
def test_a_step_that_does_not_add_up_is_found(answer, step):
    assert wrong_step(answer) == step


def test_unknown_names_have_a_hint():
    with pytest.raises(PluginError, match="unknown interaction 'gsm9k': did you mean 'gsm8k'"):
        Users(Config()).get("gsm9k")
    assert Users(Config()).names == ["code_verify", "gsm8k", "llm_user", "scripted"]


def test_wrong_options_of_a_builtin_are_refused():
    config = RolloutConfig(interaction="code_verify", interaction_kwargs={"max_turn": 2})
    with pytest.raises(ConfigError, match="did you mean 'max_turns'"):
        Users(Config(rollout=config)).get("code_verify")


def test_options_are_for_the_configured_interaction_only():
    config = RolloutConfig(interaction="code_verify", interaction_kwargs={"max_turns": 2})
    found = Users(Config(rollout=config))
    assert found.get("code_verify").options == {"max_turns": 2} and found.get("gsm8k").options == {}


def test_a_user_of_the_row_comes_before_the_configured_one(sample):
    config = RolloutConfig(interaction="gsm8k")
    found = Users(Config(rollout=config))
    assert found.spec_for(sample()).name == "gsm8k"
    assert found.spec_for(sample(interaction=InteractionSpec("code_verify"))).name == "code_verify"
    assert Users(Config()).spec_for(sample()) is None
