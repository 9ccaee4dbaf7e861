"""Every knob of `rollout` arrives: an episode, a plan or a toolbox made with another value is another one."""

import asyncio
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from turnwise import BaseInteraction, Trajectory, configure, evaluate
from turnwise.config import RolloutConfig
from turnwise.config.choices import Keep
from turnwise.engines.devices import choose
from turnwise.errors import ConfigError, DataError, TurnwiseError
from turnwise.ext.sdk_agents.config import SdkAgentsConfig
from turnwise.ext.verl.config import VerlConfig
from turnwise.rollout.tools.tool import tool
from turnwise.rollout.users.user import Reply
from turnwise.types import CallStatus, Image, Message, Role, Sample, StopReason, ToolCall

ME = __name__


async def asker(turn, *, words: str = "More?"):
    """Always wants more, in the words that it is given."""
    return Reply(words, score=0.0)


class Asker(BaseInteraction):
    """The same as a class of a registry file."""

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, self.config["words"], 0.0, {}


@tool
async def long_words() -> str:
    """A long reply."""
    return "first " + "x " * 5000 + "last"


@tool
async def never() -> str:
    """Never come back."""
    await asyncio.Event().wait()
    return ""


async def twice(chat, *, times: int = 2) -> None:
    """A loop of the user's."""
    for _ in range(times):
        await chat.generate()
        chat.add([Message(Role.USER, "Go on.")])


def asked(stage: Any, **settings: Any) -> Trajectory:
    return stage.rollouts.make([str(n) for n in range(30)], interaction=f"{ME}:asker", **settings).play()


def file(stage: Any, name: str, text: str) -> str:
    path = stage.folder / name
    path.write_text(text)
    return str(path)


def check_workers(stage: Any) -> None:
    narrow = "rollout.tool_options={calculate: {concurrency: 2}}"
    config = configure("rollout.tools=[calculate]", narrow, "rollout.workers=3", f"runs_dir={stage.folder}")
    with pytest.raises(ConfigError, match=r"rollout\.workers=3: the tool calculate takes 2 call\(s\)"):
        evaluate(config)


def check_agent(stage: Any) -> None:
    assert len(stage.rollouts.make(["a", "b", "c"], agent=f"{ME}:twice").play().turns) == 2


def check_agent_options(stage: Any) -> None:
    rollout = stage.rollouts.make(["a", "b", "c"], agent=f"{ME}:twice", agent_options={"times": 3})
    assert len(rollout.play().turns) == 3


def check_agents_file(stage: Any) -> None:
    agents = file(stage, "agents.yaml", f"- name: mine\n  _target_: {ME}:twice\n  times: 3\n")
    assert len(stage.rollouts.make(["a", "b", "c"], agents_file=agents, agent="mine").play().turns) == 3


def check_client(stage: Any) -> None:
    rollout = stage.rollouts.make(["a"], client=f"{ME}:own_agent")
    assert rollout.context.plan.route(rollout.samples[0]).agent == "openai_client"


def check_client_env(stage: Any) -> None:
    """The variable is asked for by name when the program is made ready."""
    with pytest.raises(TurnwiseError, match=r"sdk_agents\.client_env: the environment variable NOWHERE_SET is not set"):
        rollout = stage.rollouts.make(["a"], client="exec:true", client_env=["NOWHERE_SET"])
        rollout.play()


def check_scripted_answer(stage: Any) -> None:
    """What a run is tried with before it begins; the scorer sees it."""
    seen = []

    async def reads(trajectory: Trajectory) -> float:
        seen.append(trajectory.answers[-1].text)
        return 1.0

    config = configure("eval.samples=1", f"runs_dir={stage.folder}", "rollout.tools=[]", "rollout.interaction=null")
    config.rollout.scripted_answer = '{"answer": 0}'
    evaluate(config, samples=[stage.sample()], scorer=reads, console=Console(quiet=True))
    assert seen[0] == '{"answer": 0}'


def check_tools(stage: Any) -> None:
    from turnwise.rollout.prepare import prepare

    config = configure("task=null", "engine=scripted", "rollout.tools=[calculate]")
    config.engine.script = ["a"]
    assert list(prepare(config, "test", samples=[stage.sample()], scorer=right).toolbox.tools) == ["calculate"]


def check_tool_options(stage: Any) -> None:
    reply, _ = stage.one(long_words, tool_options={"long_words": {"max_reply_tokens": 8}})
    assert len(reply.text) < 200 < len(stage.one(long_words)[0].text)


def check_interaction(stage: Any) -> None:
    assert len(asked(stage, max_assistant_turns=3).turns) == 3


def check_interaction_kwargs(stage: Any) -> None:
    turns = asked(stage, max_assistant_turns=2, interaction_kwargs={"words": "And now?"}).turns
    assert turns[0].replies[0].text == "And now?"


def check_interactions_file(stage: Any) -> None:
    text = f"interaction:\n- name: asker\n  class_name: {ME}.Asker\n  config: {{words: Filed}}\n"
    settings = {"interactions_file": file(stage, "users.yaml", text), "interaction": "asker", "max_assistant_turns": 2}
    assert stage.rollouts.make(["a", "b"], **settings).play().turns[0].replies[0].text == "Filed"


def check_max_assistant_turns(stage: Any) -> None:
    ended = asked(stage, max_assistant_turns=4)
    assert (len(ended.turns), ended.stop_reason) == (4, StopReason.ASSISTANT_TURN_BUDGET)


def check_max_user_turns(stage: Any) -> None:
    ended = asked(stage, max_user_turns=2)
    assert (len(ended.turns), ended.stop_reason) == (3, StopReason.USER_TURN_BUDGET)


def check_max_parallel_calls(stage: Any) -> None:
    calls = [ToolCall(f"t{n}", "long_words", {}) for n in range(3)]
    statuses = [
        [one.status for one in stage.run([long_words], calls, **more)[1]] for more in ({}, {"max_parallel_calls": 2})
    ]
    assert statuses == [[CallStatus.OK] * 3, [CallStatus.OK, CallStatus.OK, CallStatus.REFUSED]]


def check_max_malformed_calls(stage: Any) -> None:
    ended = stage.rollouts.make(["<tool_call>{</tool_call>"] * 9, tools=[long_words], max_malformed_calls=2).play()
    assert (len(ended.turns), ended.stop_reason) == (2, StopReason.MALFORMED_CALL_BUDGET)


def check_max_tokens(stage: Any) -> None:
    ended = stage.rollouts.make(["one two three four five six"], max_tokens=4096).play()
    assert ended.stop_reason is StopReason.ANSWERED
    rollout = stage.rollouts.make(["one two three four five six"])
    rollout.context.config.rollout.max_tokens = 3
    cut = rollout.play()
    assert (cut.stop_reason, cut.turns[0].completion_tokens) == (StopReason.TOKEN_BUDGET, 3)


def check_max_images(stage: Any) -> None:
    from turnwise.rollout.prepare import measured_images

    message = Message(Role.USER, (Image(b"1"), Image(b"2")))
    sample, seeing = Sample("s", (message,), "x"), SimpleNamespace(images=object(), image_roles=[Role.USER])
    with pytest.raises(DataError, match=r"has 2 images, and rollout\.max_images=1"):
        measured_images(sample, configure("rollout.max_images=1"), seeing)  # type: ignore[arg-type]


def check_max_seconds(stage: Any) -> None:
    ended = stage.rollouts.make([stage.call("never")], tools=[never], max_seconds=0.05).play()
    assert ended.stop_reason is StopReason.TIME_BUDGET


def check_max_reply_tokens(stage: Any) -> None:
    assert len(stage.one(long_words, max_reply_tokens=8)[0].text) < 200


def check_keep(stage: Any) -> None:
    head, tail = (stage.one(long_words, max_reply_tokens=40, keep=keep)[0].text for keep in (Keep.head, Keep.tail))
    assert "first" in head and "last" not in head and "last" in tail and "first" not in tail


def check_tool_timeout(stage: Any) -> None:
    reply, record = stage.one(never, tool_timeout=0.05)
    assert record.status is CallStatus.TIMEOUT and "0.05" in reply.text


def check_concurrency(stage: Any) -> None:
    assert choose(configure("rollout.concurrency=7")).episodes == 7 != choose(configure()).episodes


def check_max_failures(stage: Any) -> None:
    def played(share: float) -> Any:
        config = configure("task=null", "engine=scripted", f"runs_dir={stage.folder}", f"rollout.max_failures={share}")
        config.engine.script, config.rollout.agent = ["a"], f"{ME}:sometimes"
        samples = [stage.sample(f"s{n}") for n in range(8)]
        return evaluate(config, samples=samples, scorer=right, console=Console(quiet=True))

    assert sum(one.failure is not None for one in played(0.5).trajectories) == 2
    with pytest.raises(TurnwiseError, match=r"rollout\.max_failures=0\.1"):
        played(0.1)


async def own_agent(base_url: str, sample: Any) -> None:
    """An agent that would call the address."""


async def right(trajectory: Trajectory) -> float:
    return 1.0


async def sometimes(chat) -> None:
    """Fails for two samples of eight."""
    if chat.sample.id in ("s3", "s6"):
        raise RuntimeError("no")
    await chat.generate()


ARRIVALS = {name.removeprefix("check_"): made for name, made in list(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize(
    "knob",
    [
        field.name
        for field in (*fields(RolloutConfig), *fields(SdkAgentsConfig), *fields(VerlConfig))
        if field.name != "strict"
    ],
)
def test_a_knob_of_the_rollout_arrives(knob: str, rollouts, one, run, call, sample, tmp_path: Path) -> None:
    assert knob in ARRIVALS, f"rollout.{knob} needs a check that its value arrives where it is used"
    ARRIVALS[knob](SimpleNamespace(rollouts=rollouts, one=one, run=run, call=call, sample=sample, folder=tmp_path))
