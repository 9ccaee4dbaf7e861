"""What a simulated user says never holds the answer, whatever it is and whatever the policy says."""

import asyncio
import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.rollout.users.loading import builtin_users
from turnwise.rollout.users.user import UserTurn
from turnwise.types import Message, Role, Sample

SAID_BY_OTHERS = {"llm_user", "scripted"}
"""What these say is a plug-in's, a model's or the script's in a row: none of it is ours to keep free of the answer."""
USERS = [name for name in builtin_users() if name not in SAID_BY_OTHERS]
TRUTHS = st.one_of(
    st.integers().map(str),
    st.decimals(allow_nan=False, allow_infinity=False, places=2).map(str),
    st.fractions().map(str),
    st.text(min_size=1, max_size=20),
)
ANSWERS = st.lists(st.one_of(st.text(max_size=40), TRUTHS.map(lambda truth: f"so #### {truth}")), max_size=4)


def replies(name: str, truth: str, answers: list[str]) -> list[str]:
    """Everything the user says to these answers; the question holds the truth, so that it could be repeated."""

    async def talk() -> list[str]:
        user = getattr(importlib.import_module(f"turnwise.rollout.users.{name}"), name)
        question = Message(Role.USER, f"Is it {truth}?")
        messages, said, own = [question], [], []
        for number, answer in enumerate(answers, 1):
            own.append(Message(Role.ASSISTANT, answer))
            messages.append(own[-1])
            facts = {"ground_truth": truth, "query": truth}
            sample = Sample("s", (question,), "test", truth)
            reply = await user(UserTurn(sample, tuple(messages), tuple(own), (), number, facts))
            messages.append(Message(Role.USER, reply.text))
            said.append(reply.text)
        return said

    return asyncio.run(talk())


def test_there_are_users_to_test() -> None:
    assert {"gsm8k", "code_verify"} <= set(USERS)


@pytest.mark.parametrize("name", USERS)
@settings(max_examples=60, deadline=None)
@given(truth=TRUTHS, answers=ANSWERS)
def test_feedback_never_contains_the_answer(name: str, truth: str, answers: list[str]) -> None:
    said = replies(name, truth, [*answers, "no idea", "so #### 0", f"so #### {truth}"])
    # Every text is one that is also said when the truth is another one, and that holds no number at all.
    always = {*replies(name, "seven", ["no idea"] * 4), *replies(name, "7", ["so #### 7"])}
    assert set(said) <= always
    assert not any(character.isdigit() for text in always for character in text)
