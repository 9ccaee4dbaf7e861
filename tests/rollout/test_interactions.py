"""The built-in users: gsm8k says right or wrong and never the answer, code_verify doubts as often as it is told to."""

import asyncio

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from turnwise.errors import ConfigError, EpisodeError
from turnwise.rollout.interactions.base import BaseInteraction, last_assistant_text
from turnwise.rollout.interactions.code_verify import FEEDBACK, TERMINATE, CodeVerifyInteraction
from turnwise.rollout.interactions.gsm8k import LAST_TRY, NO_ANSWER, RIGHT, WRONG, Gsm8kInteraction, wrong_step
from turnwise.types import StopReason

WORDS = st.text(max_size=60)
NUMBERS = st.one_of(st.integers(-(10**6), 10**6).map(str), st.decimals(allow_nan=False, allow_infinity=False).map(str))


def ask(user, truth, answers):
    """What the user says to each answer."""

    async def main():
        identity = await user.start_interaction("i", ground_truth=truth)
        messages = [{"role": "user", "content": f"The answer is {truth}. What is it?"}]
        said = []
        for answer in answers:
            messages.append({"role": "assistant", "content": answer})
            said.append(await user.generate_response(identity, messages, ground_truth=truth))
            messages.append({"role": "user", "content": said[-1][1]})
        score = await user.calculate_score(identity)
        await user.finalize_interaction(identity)
        return said, score

    return asyncio.run(main())


@given(truth=NUMBERS, answers=st.lists(st.one_of(WORDS, NUMBERS.map(lambda n: f"so #### {n}")), min_size=1, max_size=4))
def test_gsm8k_never_tells_the_answer(truth, answers):
    """Its words are one of two fixed texts, so nothing about the truth but right or wrong is in them."""
    user = Gsm8kInteraction({"name": "gsm8k"})
    said, score = ask(user, truth, answers)
    for (ends, text, value, extra), _ in zip(said, answers, strict=True):
        assert text == (RIGHT if ends else WRONG)
        assert value == float(ends)
        assert extra == {}
    assert score == said[-1][2]
    assert user._truth == {} and user._score == {}


@given(one=NUMBERS, other=NUMBERS, answer=WORDS)
def test_gsm8k_says_the_same_whatever_the_truth_when_the_answer_is_wrong(one, other, answer):
    assume(f"#### {one}" not in answer and f"#### {other}" not in answer and "####" not in answer)
    user = Gsm8kInteraction({"name": "gsm8k"})
    assert ask(user, one, [answer])[0] == ask(user, other, [answer])[0]


@pytest.mark.parametrize(
    ("answer", "right"),
    [("#### 42", True), ("#### 4,2", True), ("####42", False), ("42", False), ("#### 41 #### 42", True),
     ("#### 42 or #### 41", False), ("#### 42.", False), ("#### 42" + "x" * 300, False)],
)  # fmt: skip
def test_gsm8k_judges_by_verls_strict_rule(answer, right):
    assert ask(Gsm8kInteraction({}), "42", [answer])[0][0][0] is right


def test_gsm8k_needs_a_ground_truth(theatre, sample):
    show = theatre.show(["#### 42"], interaction="gsm8k", samples=[sample(ground_truth=None)])
    trajectory = show.play()
    assert trajectory.stop_reason is StopReason.FAILED
    assert "needs interaction_kwargs.ground_truth" in trajectory.failure
    with pytest.raises(EpisodeError):
        asyncio.run(Gsm8kInteraction({}).start_interaction("i"))


def test_gsm8k_in_an_episode_forgets_it(theatre):
    show = theatre.show(["#### 41", "#### 42"], interaction="gsm8k")
    trajectory = show.play()
    user = show.context.interactions.get("gsm8k")
    assert trajectory.stop_reason is StopReason.USER_ENDED
    assert [turn.user_score for turn in trajectory.turns] == [0.0, 1.0]
    assert trajectory.artifacts["interaction_score"] == 1.0
    assert user._truth == {} and user._score == {}


def test_gsm8k_forgets_many_episodes(theatre, sample):
    samples = [sample(f"s{n}", ground_truth=str(n)) for n in range(20)]
    show = theatre.show(lambda r: f"#### {r.turn}", interaction="gsm8k", samples=samples, max_assistant_turns=9)

    async def main():
        return await asyncio.gather(*(show.episode(n) for n in range(20)))

    trajectories = asyncio.run(main())
    assert [len(t.turns) for t in trajectories] == [min(n + 1, 9) for n in range(20)]
    assert show.context.interactions.get("gsm8k")._truth == {}


def test_gsm8k_takes_no_options():
    with pytest.raises(ConfigError, match="unknown option of interaction 'gsm8k'"):
        Gsm8kInteraction({"name": "gsm8k", "tell": True})


@pytest.mark.parametrize("times", [0, 1, 3])
def test_code_verify_doubts_as_often_as_told(theatre, times):
    show = theatre.show(["#### 42"], interaction="code_verify", interaction_kwargs={"max_turns": times})
    trajectory = show.play()
    assert trajectory.stop_reason is StopReason.USER_ENDED
    assert [m.text for turn in trajectory.turns for m in turn.replies] == [FEEDBACK] * times
    assert len(trajectory.turns) == times + 1
    assert show.context.interactions.get("code_verify")._asked == {}
    assert [turn.user_score for turn in trajectory.turns] == [None] * (times + 1)


def test_code_verify_says_what_it_is_told_to_say():
    user = CodeVerifyInteraction({"feedback_message": "Hm?", "terminate_message": "Ok.", "max_turns": 2})
    said, score = ask(user, "1", ["a", "b", "c"])
    assert [(ends, text) for ends, text, _, _ in said] == [(False, "Hm?"), (False, "Hm?"), (True, "Ok.")]
    assert [extra for *_, extra in said] == [{"asked": 1}, {"asked": 2}, {}]
    assert score is None
    assert ask(CodeVerifyInteraction({}), "1", ["a", "b"])[0][1][:2] == (True, TERMINATE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_turns": -1}, "max_turns must be 0 or more"),
        ({"max_turns": "2"}, "max_turns must be int, not '2'"),
        ({"max_turns": True}, "max_turns must be int, not True"),
        ({"feedback_message": 3}, "feedback_message must be str"),
        ({"feedback": "x"}, "did you mean 'feedback_message'"),
    ],
)
def test_code_verify_refuses_wrong_options(options, words):
    with pytest.raises(ConfigError, match=words):
        CodeVerifyInteraction({"name": "code_verify", **options})


def test_the_last_assistant_message_is_found_behind_others():
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}]
    assert last_assistant_text(messages) == "a"
    assert last_assistant_text([{"role": "user", "content": "u"}]) == ""


def test_the_base_class_makes_an_id_when_none_is_given():
    user = BaseInteraction({})
    first, second = asyncio.run(user.start_interaction()), asyncio.run(user.start_interaction())
    assert first and second and first != second
    assert asyncio.run(user.start_interaction("given")) == "given"
    assert user.name == "BaseInteraction" and BaseInteraction({"name": "x"}).name == "x"


def test_gsm8k_with_hints_tells_what_is_missing_and_never_the_answer(theatre, sample):
    said = ["It is 42.", "6*7=41 so #### 41", "#### 41", "#### $42.00"]
    hints = {"interaction": "gsm8k", "interaction_kwargs": {"hints": True, "tries": 4}}
    trajectory = theatre.show(said, samples=[sample()], **hints).play()
    replies = [turn.replies[0].text for turn in trajectory.turns if turn.replies]
    assert replies[0] == NO_ANSWER and "The step 6*7=41 is not right" in replies[1]
    assert replies[2] == WRONG + LAST_TRY and not any("42" in reply for reply in replies)
    assert trajectory.artifacts["interaction_score"] == 1.0 and trajectory.stop_reason is StopReason.USER_ENDED
    given_up = theatre.show(["#### 1"], samples=[sample()], **hints).play()
    assert len(given_up.turns) == 4 and given_up.artifacts["interaction_score"] == 0.0


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
