"""Wall time of 1,000 concurrent scripted episodes over the longest chain of their tools' and user's latencies.

Each episode calls a tool three times (10 to 100 ms each, drawn by seed), answers, is asked once more by a user (10 to
100 ms), and answers again. The longest chain is what a rollout that costs nothing would take. The same episodes run
once with rendering and tokens (`tokens`) and once with messages only (`messages`), which is what the rollout itself
costs. Memory is read after each round; it should not grow once caches are warm.

    python benchmarks/rollout.py [--episodes 1000] [--group 8] [--rounds 10] [--scale 1]
"""

import argparse
import asyncio
import gc
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.chat.formats import hermes
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config import Config
from turnwise.engines.samplers.request import NoiseKey
from turnwise.engines.samplers.scripted import ScriptedSampler
from turnwise.models.tiny.recipe import make_tokenizer
from turnwise.rollout.chat_backends import AssistantReply, TokenBackend
from turnwise.rollout.collector import Collector
from turnwise.rollout.episode import MakeBackend, RolloutContext
from turnwise.rollout.group import run_group
from turnwise.rollout.interaction_sessions import Interactions
from turnwise.rollout.interactions.base import BaseInteraction
from turnwise.rollout.plan import Plan
from turnwise.rollout.toolbox import Toolbox
from turnwise.rollout.tools.tool import tool
from turnwise.types import (
    FinishReason,
    Group,
    JsonSchema,
    Ledger,
    Message,
    RenderCheck,
    Role,
    Sample,
    StopReason,
    ToolCall,
)

CALLS = 3
LOW, HIGH = 10, 100
"""Milliseconds of one latency."""


def latencies(sample: str, sibling: int) -> list[int]:
    """Milliseconds of the three tool calls and of the user's word, drawn by seed."""
    rng = random.Random(f"{sample}/{sibling}")
    return [rng.randint(LOW, HIGH) for _ in range(CALLS + 1)]


def make_tool(scale: float) -> Any:
    """A tool that takes its time."""

    @tool(concurrency=1 << 20)
    async def look_up(key: str, milliseconds: int) -> str:
        """Look up the value of a key."""
        await asyncio.sleep(scale * milliseconds / 1000)
        return f"The value of {key} is {milliseconds}."

    return look_up


class Asker(BaseInteraction):
    """A user who thinks for a while, asks once more, and is content with the next answer."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        if sum(message["role"] == "user" for message in messages) > 1:
            return True, "Thank you.", 1.0, {}
        answer = messages[-1]["content"]  # it names the sibling, whose latency is drawn with the others
        wait = latencies(kwargs["query"], int(answer.rpartition(" ")[2]))[CALLS]
        await asyncio.sleep(self.config["scale"] * wait / 1000)
        return False, "Are you sure? Look again and answer once more.", 0.5, {}


def line(sample: Sample, sibling: int, turn: int) -> str:
    """What the policy says."""
    if turn >= CALLS:
        return f"#### {sibling}"
    milliseconds = latencies(sample.prompt[-1].text, sibling)[turn]
    return "I look it up.\n" + hermes.render_call(
        ToolCall("", "look_up", {"key": f"key {turn}", "milliseconds": milliseconds})
    )


@dataclass(slots=True)
class MessageBackend:
    """The same words without a renderer or a tokenizer: what is left is the rollout itself."""

    messages: Sequence[Message]
    segments: list[Ledger] = field(default_factory=list)

    def open(self, prompt: Sequence[Message]) -> None:
        return None

    def used(self) -> int:
        return 0

    def room(self) -> int | None:
        return None

    async def reply(self, turn: int, max_tokens: int) -> AssistantReply:
        return AssistantReply(self.messages[turn], FinishReason.STOP, 0, 0, 0, 0, 0)

    def append_replies(
        self, messages: Sequence[Message], replies: Sequence[Message], turn: int, budget: int | None
    ) -> StopReason | None:
        return None

    def check(self, messages: Sequence[Message]) -> RenderCheck | None:
        return None

    async def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Measured:
    """One round."""

    wall: float
    cpu: float


class Bench:
    """Samples, and the two ways to play them."""

    def __init__(self, episodes: int, group: int, scale: float, folder: Path) -> None:
        self.group, self.scale = group, scale
        system = Message(Role.SYSTEM, "Look things up with the tool. End with #### and the number.")
        questions = [f"What are the values of three keys, problem {n}?" for n in range(episodes // group)]
        self.samples = [
            Sample(f"bench:{n}", (system, Message(Role.USER, text)), "bench", "0") for n, text in enumerate(questions)
        ]
        self.by_id = {sample.id: sample for sample in self.samples}
        chains = [sum(latencies(text, sibling)) for text in questions for sibling in range(group)]
        self.chain = scale * max(chains) / 1000
        make_tokenizer(folder)
        self.renderer = Renderer(Tokenizer(folder), hermes)
        self.sampler = ScriptedSampler(
            self.renderer.tokenizer,
            lambda request: line(self.by_id[request.noise.sample], request.noise.sibling, request.turn),
            end_id=min(self.renderer.stop_ids),
        )

    def context(self, make_backend: MakeBackend, config: Config) -> RolloutContext:
        config.rollout.interaction = f"{__name__}:Asker"
        config.rollout.interaction_kwargs = {"scale": self.scale}
        toolbox, interactions = Toolbox([make_tool(self.scale)], config.rollout), Interactions(config.rollout)
        return RolloutContext(
            config, Plan(self.samples, config.rollout, toolbox, interactions), toolbox, interactions, make_backend
        )

    def with_tokens(self) -> RolloutContext:
        config = Config()

        def backend(conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> TokenBackend:
            return TokenBackend(self.renderer, self.sampler, config.sampling, tools, noise, conversation)

        return self.context(backend, config)

    def with_messages(self) -> RolloutContext:
        messages = {
            (sample.id, sibling): [
                hermes.parse(line(sample, sibling, turn), turn=turn, in_reasoning=False) for turn in range(CALLS + 2)
            ]
            for sample in self.samples
            for sibling in range(self.group)
        }

        def backend(conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> MessageBackend:
            return MessageBackend(messages[noise.sample, noise.sibling])

        return self.context(backend, Config())

    async def round(self, context: RolloutContext, step: int) -> Measured:
        """Every episode once, all under way together."""

        async def run(sample: Sample) -> Group:
            return await run_group(sample, size=self.group, step=step, context=context)

        wall, cpu, count = time.perf_counter(), time.process_time(), len(self.samples)
        async with Collector(self.samples, run, running=count, ahead=count) as collector:
            groups = await collector.next_groups(count)
        measured = Measured(time.perf_counter() - wall, time.process_time() - cpu)
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            check = trajectory.render_check
            assert trajectory.stop_reason is StopReason.USER_ENDED, trajectory.failure
            assert len(trajectory.turns) == CALLS + 2 and len(trajectory.calls) == CALLS
            assert check is None or check.exact
        return measured


def memory() -> tuple[float, int]:
    """(resident megabytes of this process, objects the garbage collector knows)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(gc.get_objects())


def report(name: str, bench: Bench, rounds: Sequence[Measured], episodes: int) -> None:
    best = min(rounds, key=lambda measured: measured.wall)
    print(
        f"{name:9s} wall {best.wall:.2f} s over the longest chain of {bench.chain:.2f} s: ratio "
        f"{best.wall / bench.chain:.2f}; CPU {1e3 * best.cpu / episodes:.2f} ms an episode (best of {len(rounds)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--group", type=int, default=8, help="siblings of one sample")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="latencies are multiplied by it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.episodes, args.group, args.scale, Path(folder))
    episodes = len(bench.samples) * args.group
    print(f"{episodes} episodes in groups of {args.group}, {CALLS + 2} assistant turns each, {LOW}-{HIGH} ms latencies "
          f"times {args.scale:g}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")  # fmt: skip
    context, kept, rounds = bench.with_tokens(), [], []
    for step in range(args.rounds):
        rounds.append(asyncio.run(bench.round(context, step)))
        kept.append(memory())
        last, (resident, objects) = rounds[-1], kept[-1]
        times = f"wall {last.wall:.2f} s, CPU {last.cpu:.2f} s"
        print(f"round {step + 1:2d}: {times}, RSS {resident:.1f} MB, {objects} objects")
    report("tokens", bench, rounds, episodes)
    context = bench.with_messages()
    report("messages", bench, [asyncio.run(bench.round(context, step)) for step in range(3)], episodes)
    if args.rounds > 3:
        grown, more = kept[-1][0] - kept[2][0], kept[-1][1] - kept[2][1]
        print(f"memory    {grown:+.1f} MB and {more:+d} objects from round 3 to round {args.rounds}")


if __name__ == "__main__":
    main()
