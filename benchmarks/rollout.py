"""CPU time of an assistant turn, wall time of 1,000 concurrent episodes, and memory of 10,000.

Each episode calls a tool three times (10 to 100 ms each, drawn by seed), answers, is asked once more by a user (10 to
100 ms), and answers again: five turns. The peer is the longest chain of those latencies, which is what a rollout that
costs nothing would take. The same episodes run once with rendering and tokens (`tokens`: completions lie ready; reading
them, the ledger and the self-check of one episode in sixteen are in it) and once with messages only (`messages`), which
is what the rollout itself costs. Memory is read after each round; it should not grow once caches are warm.

    python benchmarks/rollout.py [--episodes 1000] [--group 8] [--rounds 5] [--many 10000] [--scale 1] [--profile]
"""

import argparse
import asyncio
import cProfile
import functools
import gc
import os
import pstats
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise import BaseInteraction
from turnwise.chat.formats import hermes
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config import Config
from turnwise.engines.samplers.request import NoiseKey, Request
from turnwise.engines.samplers.scripted import ScriptedSampler
from turnwise.rollout.chat_backends import TokenBackend
from turnwise.rollout.collector import Collector, run_group
from turnwise.rollout.episode import MakeBackend, RolloutContext
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.tool import tool
from turnwise.rollout.users.loading import Users
from turnwise.system.plugins import load
from turnwise.types import (
    Completion,
    FinishReason,
    Group,
    Image,
    JsonSchema,
    Ledger,
    Message,
    RenderCheck,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Turn,
)

RECIPE = Path(__file__).parents[1] / "examples" / "tiny_model" / "recipe.py"
"""Has the tokenizer of the bundled model."""

CALLS = 3
LOW, HIGH = 10, 100
"""Milliseconds of one latency."""
TURN_MS, CHAINS = 0.25, 4
"""What a turn may cost, and the whole of the episodes in longest chains."""


@functools.cache
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


class ReadySampler(ScriptedSampler):
    """A sampler whose completions lie ready, as those of an engine elsewhere would."""

    def __init__(self, renderer: Renderer, samples: Sequence[Sample], group: int) -> None:
        end_id = min(renderer.stop_ids)
        super().__init__(renderer.tokenizer, lambda request: "", end_id=end_id)
        self._said: dict[str, list[int]] = {}
        self._ready: dict[tuple[str, int], list[Completion]] = {}
        for sample in samples:
            for sibling in range(group):
                ids = [[*self._ids(line(sample, sibling, turn)), end_id] for turn in range(CALLS + 2)]
                made = [Completion.of(one, [-0.5] * len(one), FinishReason.STOP, version=0) for one in ids]
                self._ready[sample.id, sibling] = made

    async def generate(self, request: Request) -> Completion:
        turn = self._turns[request.conversation]
        self._turns[request.conversation] += 1
        return self._ready[request.noise.sample, request.noise.sibling][turn]

    async def release(self, conversation: str) -> None:
        del self._turns[conversation]

    def _ids(self, text: str) -> list[int]:
        if text not in self._said:
            self._said[text] = self._tokenizer.encode(text).ids
        return self._said[text]


@dataclass(slots=True)
class MessageBackend:
    """The same words without a renderer or a tokenizer: what is left is the rollout itself."""

    messages: Sequence[Message]
    segments: list[Ledger] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    tools: Sequence[JsonSchema] = ()
    image_roles = frozenset[Role]()
    token_spans = None

    def has_prepared(self, images: Sequence[Image]) -> bool:
        return not images

    def open(self, prompt: Sequence[Message]) -> None:
        return None

    def used(self) -> int:
        return 0

    def room(self) -> int | None:
        return None

    async def reply(self, turn: int, max_tokens: int, stop: Sequence[str] = ()) -> Turn:
        return Turn(turn, self.messages[turn], FinishReason.STOP, 0, 0, 0)

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
        chains = [sum(latencies(text, sibling)) for text in questions for sibling in range(group)]
        self.chain = scale * max(chains) / 1000
        load(f"{RECIPE}:make_tokenizer", "recipe")(folder)
        self.renderer = Renderer(Tokenizer(folder), hermes)
        self.sampler = ReadySampler(self.renderer, self.samples, group)

    def context(self, make_backend: MakeBackend, config: Config) -> RolloutContext:
        config.rollout.interaction = f"{__name__}:Asker"
        config.rollout.interaction_kwargs = {"scale": self.scale}
        toolbox, users = Toolbox([make_tool(self.scale)], config.rollout), Users(config)
        return RolloutContext(config, Plan(self.samples, config, toolbox, users), toolbox, users, make_backend)

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
            return await run_group(sample, range(self.group), step=step, context=context)

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


class Peak:
    """The most memory that this process held while a block ran, in megabytes."""

    def __init__(self) -> None:
        self.most = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            self.most = max(self.most, resident())


def resident() -> float:
    """Megabytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def with_load(text: str) -> None:
    print(f"{text}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", flush=True)


def speed(bench: Bench, episodes: int, rounds: int) -> None:
    """CPU and wall time. The first round is left out: all of its episodes are checked, and caches are cold."""
    turns = episodes * (CALLS + 2)
    for name, context, target in (("tokens", bench.with_tokens(), True), ("messages", bench.with_messages(), False)):
        asyncio.run(bench.round(context, 0))
        measured = [asyncio.run(bench.round(context, step)) for step in range(1, rounds + 1)]
        cpu, wall = min(one.cpu for one in measured), min(one.wall for one in measured)
        wanted = (f" (target: at most {TURN_MS})", f" (target: below {CHAINS})") if target else ("", "")
        with_load(
            f"{name:9s} {1e3 * cpu / turns:.3f} ms of CPU a turn{wanted[0]}; {episodes} episodes in {wall:.2f} s, "
            f"{wall / bench.chain:.2f} times the longest chain of {bench.chain:.2f} s{wanted[1]}; best of {rounds}"
        )
    frames = bench.renderer.frames
    assert frames is not None
    by_template = ", ".join(f"{count} because {reason}" for reason, count in frames.rendered.items())
    print(f"frames    {frames.filled} turns were filled into frames, {frames.repeated} of them with words said before; "
          f"by the template: {by_template or 'none'}")  # fmt: skip


def flatness(bench: Bench, episodes: int, rounds: int) -> None:
    """Memory of many episodes at once, and what is left of it after each round."""
    context, kept = bench.with_tokens(), []
    for step in range(1, rounds + 1):
        gc.collect()
        before = resident()
        with Peak() as peak:
            measured = asyncio.run(bench.round(context, step))
        gc.collect()
        kept.append(resident())
        with_load(
            f"memory    {episodes} episodes at once: {1e3 * (peak.most - before) / episodes:.1f} kB each at most, "
            f"{kept[-1]:.0f} MB after round {step}, {1e3 * measured.cpu / episodes / (CALLS + 2):.3f} ms of CPU a turn"
        )
    if rounds > 2:
        print(f"memory    {kept[-1] - kept[1]:+.1f} MB from round 2 to round {rounds} (target: flat)")


def profile(bench: Bench) -> None:
    """Where the time of one round goes, by function."""
    context = bench.with_tokens()
    asyncio.run(bench.round(context, 0))
    with cProfile.Profile() as found:
        asyncio.run(bench.round(context, 1))
    pstats.Stats(found).sort_stats("tottime").print_stats(40)


def make(episodes: int, group: int, scale: float) -> Bench:
    with tempfile.TemporaryDirectory() as folder:
        return Bench(episodes, group, scale, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--many", type=int, default=10_000, help="episodes whose memory is measured; 0 for none")
    parser.add_argument("--group", type=int, default=8, help="siblings of one sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="latencies are multiplied by it")
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    args = parser.parse_args()
    bench = make(args.episodes, args.group, args.scale)
    episodes = len(bench.samples) * args.group
    print(f"{episodes} episodes in groups of {args.group}, {CALLS + 2} assistant turns each, {LOW}-{HIGH} ms latencies "
          f"times {args.scale:g}")  # fmt: skip
    if args.profile:
        return profile(bench)
    speed(bench, episodes, args.rounds)
    if args.many:
        many = make(args.many, args.group, args.scale)
        flatness(many, len(many.samples) * args.group, min(args.rounds, 4))


if __name__ == "__main__":
    main()
