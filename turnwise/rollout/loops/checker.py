"""The loop with a second pair of eyes: a fresh context reviews each answer, and what it objects to comes back."""

import re
from typing import Annotated

from pydantic import Field

from turnwise.rollout.conversation import BranchEnd, Conversation
from turnwise.types import Message, Role

SYSTEM = (
    "You check answers. Look for mistakes and say what is wrong, without solving the task anew. "
    "End with one line: `Verdict: correct` or `Verdict: incorrect`."
)
VIEW = "The task:\n{question}\n\nThe answer to check:\n{answer}"
REPLY = "Somebody checked your answer and found a mistake:\n{review}\n\nAnswer again."
NAME = "checker"
PLAIN_OPTIONS = ("rounds", "trained", "tools", "system", "view", "reply")
"""Options that name no code, file or address: a run that somebody sent may set them."""
ARTIFACT = "checks"
"""Where a trajectory keeps the verdicts, in order: correct, incorrect, or none when the review gives none."""
_VERDICT = re.compile(r"verdict\W{0,8}(in)?correct\b", re.IGNORECASE)


async def checker(
    chat: Conversation,
    *,
    rounds: Annotated[int, Field(ge=1)] = 2,
    trained: bool = False,
    tools: bool = False,
    system: str = SYSTEM,
    view: str = VIEW,
    reply: str = REPLY,
) -> None:
    """Answer, calling tools; each answer is reviewed, and one found incorrect is given again, `rounds` times at most.

    The reviewer's own tokens are a branch: learnt from when `trained`. It has the episode's tools when `tools` says so.
    The texts show `{question}`, `{answer}` and `{review}`. An answer without an objection goes to the user, if any.
    """
    verdicts: list[str] = chat.artifacts.setdefault(ARTIFACT, [])
    while True:
        message = await chat.generate()
        if message.tool_calls:
            chat.add(await chat.call_tools(message))
            continue
        if len(verdicts) < rounds:
            question = view.replace("{question}", _question(chat)).replace("{answer}", message.visible)
            review = await _review(chat, [Message(Role.SYSTEM, system), Message(Role.USER, question)], trained, tools)
            verdicts.append(_verdict(review))
            if verdicts[-1] == "incorrect":
                chat.add([Message(Role.USER, reply.replace("{review}", review))])
                continue
        replies = await chat.ask_user()
        if not replies:
            return
        chat.add(replies)


async def _review(chat: Conversation, prompt: list[Message], trained: bool, tools: bool) -> str:
    """The reviewer's last words; nothing when it came to none."""
    branch = chat.fork(prompt, name=NAME, trained=trained, tools=None if tools else [])
    try:
        message = await branch.generate()
        while message.tool_calls:
            branch.add(await branch.call_tools(message))
            message = await branch.generate()
    except BranchEnd:
        return ""
    return message.visible


def _question(chat: Conversation) -> str:
    return "\n\n".join(message.text for message in chat.sample.prompt if message.role is Role.USER)


def _verdict(review: str) -> str:
    """What the last verdict in a review says."""
    matches = list(_VERDICT.finditer(review))
    if not matches:
        return "none"
    return "incorrect" if matches[-1].group(1) else "correct"
