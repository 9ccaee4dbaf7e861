"""Several conversations in one episode: ledgers, noise, budgets and release of each, whatever the interleaving."""

import asyncio
from typing import Any

import pytest

from turnwise.errors import PluginError
from turnwise.rollout.conversation import BranchEnd, Conversation
from turnwise.types import FinishReason, Message, Origin, Role, StopReason, Trajectory


def with_loop(rollout: Any, loop: Any) -> Any:
    """The show with this agent loop for every sample."""
    plan = rollout.context.plan
    plan.loops._made |= {"tool_calling": loop, "single_turn": loop}
    return rollout


def user(text: str) -> list[Message]:
    return [Message(Role.USER, text)]


def by_branch(trajectory: Trajectory) -> dict[str, list[list[int]]]:
    return {
        branch.name: [trajectory.segments[turn.segment].token_ids.tolist() for turn in branch.turns]
        for branch in trajectory.branches
    }


async def side_by_side(chat: Conversation) -> None:
    """The main conversation and two branches of two turns each, all at the same time."""

    async def talk(branch: Conversation) -> None:
        await branch.generate()
        branch.add(user("Go on."))
        await branch.generate()

    await asyncio.gather(talk(chat), *(talk(chat.fork(user(f"As {name}."), name=name)) for name in ("red", "blue")))


def test_branches_are_recorded_beside_the_main_conversation(rollouts):
    rollout = with_loop(rollouts.make(["first words", "second words"]), side_by_side)
    trajectory = rollout.play()
    assert trajectory.failure is None and trajectory.stop_reason is StopReason.ANSWERED
    assert [message.text for message in trajectory.answers] == ["first words", "second words"]
    assert [(branch.name, branch.trained) for branch in trajectory.branches] == [("red", True), ("blue", True)]
    assert [turn.index for turn in trajectory.every_turn] == list(range(6))
    assert [turn.segment for turn in trajectory.every_turn] == [0, 0, 1, 1, 2, 2]
    for turn in trajectory.every_turn:
        ledger = trajectory.segments[turn.segment]
        assert set(ledger.turns[turn.start : turn.start + turn.completion_tokens].tolist()) == {turn.index}
    asked = {request.conversation for request in rollout.sampler.requests}
    assert len(asked) == 3 and rollout.sampler.released == dict.fromkeys(asked, 1)
    assert len({request.noise.bits() for request in rollout.sampler.requests}) == 3
    assert trajectory.render_check is not None and trajectory.render_check.exact


def test_noise_of_a_branch_depends_on_its_name_alone(rollouts):
    def order(*names: str) -> Any:
        async def loop(chat: Conversation) -> None:
            await chat.generate()
            for name in names:
                await chat.fork(user("Review."), name=name).generate()

        return loop

    def drawn(*names: str) -> dict[str, int]:
        rollout = with_loop(rollouts.make(["yes"]), order(*names))
        rollout.play()
        return {request.noise.branch: request.noise.bits() for request in rollout.sampler.requests}

    forth, back = drawn("a", "b", "b"), drawn("b", "a", "b")
    assert forth == back and set(forth) == {"", "a", "b", "b 2"} and len(set(forth.values())) == 4


@pytest.mark.parametrize("budget", [30, 60, 200])
def test_budget_of_tokens_is_shared_and_never_overrun(rollouts, budget):
    rollout = with_loop(
        rollouts.make(["some words to fill a turn with"] * 9, max_tokens=20, max_assistant_turns=None), None
    )

    async def loop(chat: Conversation) -> None:
        async def talk(branch: Conversation) -> None:
            while True:
                await branch.generate()
                branch.add(user("And further?"))

        await asyncio.gather(*(talk(one) for one in (chat, *(chat.fork(user("?"), name="b") for _ in range(3)))))

    rollout.context.config.rollout.max_tokens = budget
    trajectory = with_loop(rollout, loop).play()
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET and trajectory.failure is None
    after = 0
    for segment, ledger in enumerate(trajectory.segments):
        start = min(turn.start for turn in trajectory.every_turn if turn.segment == segment)
        after += len(ledger) - start
    assert budget - 20 <= after <= budget


def test_budget_of_turns_is_shared(rollouts):
    rollout = with_loop(rollouts.make(["words"] * 9, max_assistant_turns=4), side_by_side)
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.ASSISTANT_TURN_BUDGET and len(trajectory.every_turn) == 4


def test_cut_branch_ends_alone(rollouts):
    async def loop(chat: Conversation) -> None:
        branch = chat.fork(user("Talk."), name="talker")
        with pytest.raises(BranchEnd):
            await branch.generate()
        with pytest.raises(BranchEnd):
            await branch.generate()
        await chat.generate(max_tokens=2)
        assert chat.turns[-1].finish_reason is FinishReason.LENGTH and chat.ended is None

    trajectory = with_loop(rollouts.make(["a b c d e f g h"], max_tokens=4), loop).play()
    assert trajectory.failure is None and trajectory.stop_reason is StopReason.ANSWERED
    assert [turn.completion_tokens for turn in trajectory.every_turn] == [2, 4]


def test_tasks_left_behind_are_stopped_and_released(rollouts):
    left: list[asyncio.Task[None]] = []

    async def loop(chat: Conversation) -> None:
        branch = chat.fork(user("Hang."), name="hanging")

        async def talk() -> None:
            rollout.sampler.hang_at = 0
            await branch.generate()

        left.append(asyncio.ensure_future(talk()))
        await rollout.sampler.generating.wait()

    async def play() -> Trajectory:
        trajectory = await rollout.episode()
        await asyncio.wait(left)
        return trajectory

    rollout = with_loop(rollouts.make(["words"]), loop)
    trajectory = asyncio.run(play())
    assert left[0].cancelled() and trajectory.failure is None
    assert sum(rollout.sampler.released.values()) == 1  # the branch's; the main one never opened


def test_two_at_once_in_one_conversation_are_refused(rollouts):
    async def loop(chat: Conversation) -> None:
        await asyncio.gather(chat.generate(), chat.generate())

    rollout = with_loop(rollouts.make(["words"]), loop)
    rollout.sampler._latency = 0.001
    with pytest.raises(PluginError, match="twice at once"):
        rollout.play()


def test_tools_of_a_branch_are_those_it_shows(rollouts):
    def shout(text: str) -> str:
        """Shout.

        Args:
            text: what
        """
        return text.upper()

    call = '<tool_call>\n{"name": "shout", "arguments": {"text": "hi"}}\n</tool_call>'
    said: list[str] = []

    async def loop(chat: Conversation) -> None:
        for branch in (chat, chat.fork(user("?"), name="same"), chat.fork(user("?"), name="none", tools=[])):
            said.extend(reply.text for reply in await branch.call_tools(await branch.generate()))

    trajectory = with_loop(rollouts.make([call], tools=[shout]), loop).play()
    assert trajectory.failure is None
    assert said[:2] == ["HI", "HI"] and said[2].startswith("Error: unknown tool")


def test_prompt_of_the_loops_own(rollouts):
    async def loop(chat: Conversation) -> None:
        chat.reprompt(user("Something else."), tools=[])
        await chat.generate()
        with pytest.raises(PluginError, match="fork"):
            chat.reprompt(user("Too late."))

    trajectory = with_loop(rollouts.make(["words"]), loop).play()
    assert [message.text for message in trajectory.messages] == ["Something else.", "words"]
    assert trajectory.render_check is not None and trajectory.render_check.exact


def test_ids_extend_the_longest_recorded_sequence(rollouts):
    rollout = rollouts.make(["one", "two", "three", "four"])
    encode = rollout.context.make_backend("x", None, []).renderer.tokenizer.encode

    async def loop(chat: Conversation) -> None:
        prompt = encode("A prompt").ids
        first = await chat.generate_ids(prompt)
        second = [*prompt, *first.token_ids.tolist(), *encode(" seen").ids]
        await chat.generate_ids(second)  # extends
        await chat.generate_ids([*prompt, *encode("!").ids], origin=Origin.USER)  # no recorded one is its prefix
        full = chat.backend.segments[0].token_ids.tolist()
        await chat.generate_ids([*full, *encode(" more").ids])  # goes on in the first
        with pytest.raises(PluginError, match="by ids and by messages"):
            await chat.generate()

    trajectory = with_loop(rollout, loop).play()
    assert trajectory.failure is None
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1, 0]
    assert [turn.message.text for turn in trajectory.turns] == ["one", "two", "three", "four"]
    assert trajectory.turns[0].replies == [Message(Role.TOOL, " seen")]
    for turn, request in zip(trajectory.turns, rollout.sampler.requests, strict=True):
        assert trajectory.segments[turn.segment].token_ids[: turn.start].tolist() == request.token_ids
    first = trajectory.segments[0]
    assert set(first.origins.tolist()) == {Origin.PROMPT, Origin.POLICY, Origin.TOOL}
    assert sum(rollout.sampler.released.values()) == 2
