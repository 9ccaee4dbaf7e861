"""How `cluster=ray` scales: samplers of a fixed token rate, the learner's idle time, and what a weight update costs.

`rollout`: conversations through the real replicas, messages and actors, with samplers that sleep as long as an engine
of a fixed rate would write. Linear is what those samplers write when nothing else costs time. They share two actor
processes, because a machine has few cores; the driver speaks to each of them apart, as to an actor of its own.
Rendering, ledgers and tools are not in it (`benchmarks/rollout.py` has them).
`idle`: the real training loop and a real learner on Ray with such a sampler, for max_lag 0, 1 and 2.
`weights`: the weights of a 0.5 B model in bfloat16 to one and more readers, by each way there is.

    python benchmarks/scale.py [--parts rollout,idle,weights] [--samplers 1,2,4,16,64] [--conversations 10000]
"""

import argparse
import asyncio
import json
import os
import random
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from turnwise import configure
from turnwise.config import Config
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.weight_updates import FullWeights
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.connection import Connection, SearchPath, cluster_connection
from turnwise.ext.ray.learner import LearnerWeights
from turnwise.ext.ray.sampler_actor import SAMPLER_CALLS, SamplerActor, SamplerFacts
from turnwise.ext.ray.samplers import ActorSampler, ClusterSamplers
from turnwise.ext.ray.weight_store import WeightsPlan, pack, unpack
from turnwise.train import train
from turnwise.types import Completion, FinishReason, VersionRun

PROCESSES = 2
TURN_TOKENS = 512
PROMPT_TOKENS = 1024
QWEN_05B = {"layers": 24, "hidden": 896, "intermediate": 4864, "vocabulary": 151_936, "key_values": 128}


class SleepingSampler:
    """Writes nothing of meaning at $SCALE_RATE tokens a second and conversation, all at once, as a GPU would."""

    def __init__(self, config: Config, source: object, tokenizer: Any) -> None:
        self.context_length = 1 << 20
        self.capabilities = Capabilities(Logprobs.SCALED, frozenset({FullWeights}))
        self._rate = float(os.environ.get("SCALE_RATE", "50"))
        self._version = 0

    async def generate(self, request: Request) -> Completion:
        count = self.length(request)
        await asyncio.sleep(count / self._rate)
        run = VersionRun(self._version, count)
        ids, logprobs = np.full(count, 7, np.int64), np.full(count, -1.0, np.float32)
        return Completion(ids, logprobs, FinishReason.STOP, (run,))

    def length(self, request: Request) -> int:
        """Half of the turns are short."""
        chance = random.Random(request.noise.bits() ^ len(request.token_ids)).random()
        return max(1, int(request.params.max_tokens * (0.25 + 0.75 * chance**2)))

    async def release(self, conversation: str) -> None:
        return None

    async def publish(self, update: Any, version: int) -> None:
        if isinstance(update, FullWeights):
            for _ in update.tensors:
                pass
        self._version = version

    async def close(self) -> None:
        return None

    sleep = wake = close


class EvenSampler(SleepingSampler):
    """All turns take as long, so that it is known what linear is."""

    def length(self, request: Request) -> int:
        return request.params.max_tokens


class SleepingActor(SamplerActor):
    """One of several samplers in a process."""

    async def open(self) -> SamplerFacts:
        self._sampler = EvenSampler(self._config, None, None)
        return SamplerFacts(1 << 20, self._sampler.capabilities, 1, None, "", "float32", (), "this machine")


class Host:
    """An actor with several samplers."""

    def __init__(self, path: SearchPath, config: Config) -> None:
        self._make = lambda: SleepingActor(path, config)
        self._samplers: dict[int, SleepingActor] = {}

    async def call(self, key: int, method: str, *args: Any) -> Any:
        if key not in self._samplers:
            self._samplers[key] = self._make()
        return await getattr(self._samplers[key], method)(*args)


@dataclass(frozen=True)
class Keyed:
    """A sampler of a host, called as an actor is."""

    host: Any
    key: int

    def __getattr__(self, method: str) -> Any:
        host, key = self.host, self.key

        class Bound:
            @staticmethod
            def remote(*args: Any) -> Any:
                return host.call.remote(key, method, *args)

            @staticmethod
            def options(**_: Any) -> Any:
                return Bound

        return Bound


class FakeWeights(LearnerWeights):
    """Weights that lie in the store already."""

    def __init__(self, plan: WeightsPlan, refs: list[Any]) -> None:
        self.plan, self._parts = plan, refs

    async def parts(self) -> list[Any]:
        return self._parts


async def rollout(samplers: int, conversations: int, rate: float, ray: Connection) -> None:
    """Conversations in steady state: each asks for its next turn as soon as it has the last one."""
    config = Config()
    make = ray.actor(Host, cpus=0, gpus=0, concurrency=SAMPLER_CALLS * samplers, scheduling_strategy="SPREAD")
    hosts = [make(SearchPath.here(), config) for _ in range(min(PROCESSES, samplers))]
    replicas = [
        ActorSampler(ray, lambda n=n: Keyed(hosts[n % len(hosts)], n), n)
        for n in range(samplers)  # type: ignore[misc]
    ]
    await asyncio.gather(*(one.start() for one in replicas))
    pool = ClusterSamplers(replicas, lambda text: None, health_seconds=1e6)
    turn = TURN_TOKENS / rate
    done: list[tuple[float, float]] = []
    params = SamplingParams(TURN_TOKENS)

    async def converse(number: int) -> None:
        ids = np.ones(PROMPT_TOKENS, np.int64)
        await asyncio.sleep(random.random() * turn)
        while True:
            start = time.perf_counter()
            found = await pool.generate(Request(f"conversation {number}", ids, params, NoiseKey(0, 0, str(number), 0)))
            now = time.perf_counter()
            done.append((now, now - start))
            ids = np.concatenate([ids[:PROMPT_TOKENS], found.token_ids])

    tasks = [asyncio.create_task(converse(number)) for number in range(conversations)]
    await asyncio.sleep(2 * turn)
    begin, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(2 * turn)
    end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    late = sorted(seconds - turn for when, seconds in done if begin <= when < end)
    turns = len(late)
    published = await publish_once(pool, ray)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()
    for host in hosts:
        ray.kill(host)
    tokens, linear = turns * TURN_TOKENS / (end - begin), conversations * rate
    print(
        f"{samplers:3d} samplers, {conversations:6,d} conversations: {tokens:9,.0f} tokens/s, {tokens / linear:6.1%} "
        f"of linear; a turn of {turn:.1f} s waits {1e3 * late[turns // 2]:.0f} ms more (p50), "
        f"{1e3 * late[int(0.99 * turns)]:.0f} ms (p99); the driver's CPU {1e6 * spent / turns:.0f} us a turn, "
        f"{spent / (end - begin):.0%} of a core; an update of 64 MB meanwhile {published:.2f} s"
    )


async def publish_once(pool: ClusterSamplers, ray: Connection) -> float:
    import torch

    tensors = {f"layer.{n}": torch.zeros(2**21, dtype=torch.float32) for n in range(8)}
    plan = WeightsPlan.of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, "float32")
    refs = [ray.ray.put(part) for part in pack(plan, tensors.items())]
    for version in (1, 2):  # the first one has torch imported there
        await pool.publish(FakeWeights(plan, refs), version)
    return pool.publish_seconds


async def rollouts(args: argparse.Namespace) -> None:
    os.environ["SCALE_RATE"] = str(args.rate)
    cluster = RayConfig()
    counts = [int(one) for one in args.samplers.split(",")]
    async with cluster_connection(cluster, print) as ray:
        for samplers in counts:
            await rollout(samplers, args.conversations * samplers // max(counts), args.rate, ray)


def idle(rate: float) -> None:
    """The share of a step in which the learner has nothing to do, by the real loop."""
    os.environ["SCALE_RATE"] = str(rate)
    here = f"{Path(__file__).resolve()}:SleepingSampler"
    for lag in (0, 1, 2):
        with tempfile.TemporaryDirectory() as folder:
            config = configure(
                "rollout.tools=[calculate]", "rollout.interaction=null", "training.groups=8", "training.group_size=8",
                "training.samples=512", "eval.samples=1", "training.eval_every=0", "training.save_every=0",
                "training.steps=6", "sampling.max_tokens=64", "cluster=ray", "ray.samplers=2",
                f"engine.name={here}", "training.max_logprob_gap=1e9", f"training.max_lag={lag}", f"runs_dir={folder}",
                "run=idle", "rollout.max_assistant_turns=1",
            )  # fmt: skip
            report = train(config, console=Console(quiet=True))
            lines = [json.loads(one) for one in (report.run / "metrics.jsonl").read_text().splitlines()]
            steps = [one for one in lines if "timing_s/step" in one][2:]
            step, update = (sum(one[f"timing_s/{name}"] for one in steps) for name in ("step", "update_actor"))
            print(
                f"max_lag {lag}: a step takes {step / len(steps):.2f} s, the learner is idle for "
                f"{(step - update) / len(steps):.2f} s of it ({1 - update / step:.0%})"
            )


def shapes_05b() -> dict[str, tuple[int, ...]]:
    q = QWEN_05B
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (q["vocabulary"], q["hidden"])}
    for n in range(q["layers"]):
        at = f"model.layers.{n}"
        found |= {f"{at}.self_attn.{name}_proj.weight": (q["hidden"], q["hidden"]) for name in "qo"}
        found |= {f"{at}.self_attn.{name}_proj.weight": (q["key_values"], q["hidden"]) for name in "kv"}
        found |= {f"{at}.mlp.{name}_proj.weight": (q["intermediate"], q["hidden"]) for name in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = (q["hidden"], q["intermediate"])
    return found


class Putter:
    """The learner's side: puts weights into the store."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        import torch

        self._plan = WeightsPlan.of(shapes, "bfloat16")
        self._tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def plan(self) -> WeightsPlan:
        return self._plan

    def put(self) -> Any:
        yield from pack(self._plan, self._tensors.items())
        yield 0


class Reader:
    """A sampler's side: reads all weights once, as a sampler that copies them does."""

    async def read(self, shapes: dict[str, tuple[int, ...]], parts: list[Any]) -> float:
        return _copied(unpack(shapes, await asyncio.gather(*parts)))


def _copied(update: FullWeights) -> float:
    start = time.perf_counter()
    for _, tensor in update.tensors:
        tensor.clone()
    return time.perf_counter() - start


async def weights() -> None:
    """Bytes and seconds of an update, from the learner's tensors to copies at every reader."""
    shapes = shapes_05b()
    size = 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    print(f"weights of {size / 2e9:.2f} B parameters in bfloat16: {size / 1e9:.2f} GB")
    async with cluster_connection(RayConfig(samplers=4), print) as ray:
        putter = ray.actor(Putter, cpus=0, gpus=0)(shapes)
        plan = await putter.plan.remote()
        for readers in (1, 2, 4):
            there = [ray.actor(Reader, cpus=0, gpus=0, concurrency=2)() for _ in range(readers)]
            await asyncio.gather(*(one.read.remote({}, []) for one in there))
            start = time.perf_counter()
            refs = putter.put.options(num_returns=len(plan.parts) + 1).remote()
            await refs[-1]
            put = time.perf_counter() - start
            copied = await asyncio.gather(*(one.read.remote(plan.shapes, refs[:-1]) for one in there))
            whole = time.perf_counter() - start
            print(
                f"object store, {readers} reader(s) on one node: {whole:.2f} s (put {put:.2f} s, then read in place; "
                f"{max(copied):.2f} s of it the readers' own copies), {size / 1e9:.2f} GB once, 0 bytes by the driver"
            )
            for one in there:
                ray.kill(one)
            del refs
        ray.kill(putter)
    folders(shapes, size)


def folders(shapes: dict[str, tuple[int, ...]], size: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    ways = {"safetensors folder": tempfile.gettempdir(), "shared memory file": "/dev/shm"}
    for way, place in ways.items():
        if not Path(place).is_dir():
            print(f"{way}: there is no {place} here")
            continue
        with tempfile.TemporaryDirectory(dir=place) as folder:
            path = Path(folder, "model.safetensors")
            start = time.perf_counter()
            save_file(tensors, path)
            written = time.perf_counter() - start
            copies = {name: tensor.clone() for name, tensor in load_file(path).items()}
            whole = time.perf_counter() - start
            assert len(copies) == len(tensors)
            print(f"{way}, 1 reader: {whole:.2f} s (written in {written:.2f} s), {size / 1e9:.2f} GB in files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="rollout,idle,weights")
    parser.add_argument("--samplers", default="1,2,4,16,64")
    parser.add_argument("--conversations", type=int, default=10_000, help="with the most samplers")
    parser.add_argument("--rate", type=float, default=25.0, help="tokens a second of one conversation")
    args = parser.parse_args()
    for part in args.parts.split(","):
        if part == "rollout":
            asyncio.run(rollouts(args))
        elif part == "idle":
            idle(args.rate)
        else:
            asyncio.run(weights())


if __name__ == "__main__":
    main()
