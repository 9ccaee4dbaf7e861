"""Tokens per second of vLLM as our sampler over vLLM by itself, on the same multi-turn conversations.

`raw` is `LLM.generate` in vLLM's own interpreter, asked round by round for all conversations at once. `server` is
`engine=vllm_server` and `in process` is `engine=vllm`, asked over the Sampler protocol, every conversation by itself.
A conversation is a prompt that eight siblings share, turns of the policy of a fixed length, and what a tool says after
each. All sides are open at once and take turns, round by round, so that a busy moment of the machine hits each; the
best round of a side counts. What our process itself spends on a turn is its CPU time (`client`); `all` is that of all
processes of a side, the model's included. Runs on a GPU where vLLM sees one.

    python benchmarks/vllm_as_sampler.py --vllm venv/bin/python [--model FOLDER] [--conversations 64]
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SIBLINGS = 8
SIDES = ("raw", "in process")
TICKS = os.sysconf("SC_CLK_TCK")


def words(seed: str, count: int) -> list[int]:
    """Tokens that every vocabulary has."""
    drawn = random.Random(seed)
    return [drawn.randrange(10, 500) for _ in range(count)]


def opening(arguments: argparse.Namespace, number: int, conversation: int) -> list[int]:
    return words(f"{number}/{conversation // SIBLINGS}", arguments.prompt)


def tool(arguments: argparse.Namespace, conversation: int, turn: int) -> list[int]:
    return words(f"{conversation}/{turn}", arguments.tool)


def context(arguments: argparse.Namespace) -> int:
    return 64 + arguments.prompt + arguments.turns * (arguments.tokens + arguments.tool)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and all that it started and that still runs."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        one = int(stat.parent.name)
        children.setdefault(int(values[1]), []).append(one)
        seconds[one] = (int(values[11]) + int(values[12])) / TICKS
    total, queue = 0.0, [pid]
    while queue:
        one = queue.pop()
        total += seconds.get(one, 0.0)
        queue += children.get(one, [])
    return total


# --- vLLM by itself -------------------------------------------------------------------------------------------------


def raw(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """In vLLM's own interpreter: first that it is open, then what each round took."""
    import torch
    from vllm import LLM, SamplingParams

    gpu = torch.cuda.is_available()
    cpu = {"enforce_eager": True, "enable_chunked_prefill": False, "dtype": "float32"}
    llm = LLM(
        arguments.model, max_model_len=context(arguments), max_num_seqs=arguments.conversations, seed=0,
        enable_prefix_caching=True,
        **({"dtype": "bfloat16", "gpu_memory_utilization": arguments.memory} if gpu else cpu),
    )  # fmt: skip
    yield {}
    for number in range(arguments.rounds + 1):
        going = [opening(arguments, number, one) for one in range(arguments.conversations)]
        begun, tokens = time.perf_counter(), 0
        for turn in range(arguments.turns):
            params = [
                SamplingParams(
                    temperature=1.0, max_tokens=arguments.tokens, ignore_eos=True, logprobs=0, detokenize=False,
                    seed=number * 10**6 + turn * 10**4 + one if arguments.seeds else None,
                )
                for one in range(arguments.conversations)
            ]  # fmt: skip
            done = llm.generate([{"prompt_token_ids": ids} for ids in going], params, use_tqdm=False)
            for one, (ids, answer) in enumerate(zip(going, done, strict=True)):
                tokens += len(answer.outputs[0].token_ids)
                ids += [*answer.outputs[0].token_ids, *tool(arguments, one, turn)]
        yield {"tokens": tokens, "seconds": time.perf_counter() - begun}


# --- our samplers ---------------------------------------------------------------------------------------------------


async def play(arguments: argparse.Namespace, sampler: Any, number: int) -> dict[str, float]:
    """One round: every conversation goes on as soon as its turn is written."""
    import numpy as np

    from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams

    params = SamplingParams(max_tokens=arguments.tokens)

    async def converse(one: int) -> int:
        name, ids, written = f"{number}/{one}", opening(arguments, number, one), 0
        for turn in range(arguments.turns):
            noise = NoiseKey(number, 0, "bench", one)
            found = await sampler.generate(Request(name, np.array(ids), params, noise))
            ids += [*found.token_ids.tolist(), *tool(arguments, one, turn)]
            written += len(found.token_ids)
        await sampler.release(name)
        return written

    begun, used = time.perf_counter(), time.process_time()
    tokens = sum(await asyncio.gather(*(converse(one) for one in range(arguments.conversations))))
    return {"tokens": tokens, "seconds": time.perf_counter() - begun, "client": time.process_time() - used}


async def open_ours(arguments: argparse.Namespace, engine: str, *more: str) -> Any:
    from turnwise.data.task_config import configure
    from turnwise.engines.open_configured import open_sampler
    from turnwise.rollout.prepare import make_renderer

    config = configure(
        f"engine={engine}", f"model.path={arguments.model}", "chat.template=chatml_hermes",
        f"engine.max_batch={arguments.conversations}", f"engine.memory_fraction={arguments.memory}",
        f"servers.options=[--max-model-len, '{context(arguments)}']", f"training.max_lag={arguments.max_lag}", *more,
    )  # fmt: skip
    return (await open_sampler(config, make_renderer(config), lambda text: print(text, file=sys.stderr))).sampler


def in_process(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """`engine=vllm` in vLLM's interpreter, which finds our packages behind its own."""
    sys.path += [str(ROOT), *json.loads(os.environ["TURNWISE_BENCH_PATHS"])]
    with asyncio.Runner() as runner:
        sampler = runner.run(open_ours(arguments, "vllm"))
        try:
            yield {}
            for number in range(arguments.rounds + 1):
                yield runner.run(play(arguments, sampler, number))
        finally:
            runner.run(sampler.close())


# --- the comparison -------------------------------------------------------------------------------------------------


class Peer:
    """A side in vLLM's interpreter: it plays a round for each line that it is sent."""

    def __init__(self, arguments: argparse.Namespace, side: str) -> None:
        paths = [path for path in sys.path if path.endswith("-packages")]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
            **os.environ, "TURNWISE_BENCH_PATHS": json.dumps(paths),
        }  # fmt: skip
        command = [arguments.vllm, __file__, *sys.argv[1:], "--model", arguments.model, "--side", side]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._process.pid
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}; what it said is above")
        found: dict[str, float] = json.loads(line)
        return found

    def round(self) -> dict[str, float]:
        """What the next one took."""
        assert self._process.stdin is not None
        before = cpu_of(self.pid)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer() | {"all": cpu_of(self.pid) - before}

    def close(self) -> None:
        """It ends when nobody speaks with it any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def answer_rounds(rounds: Iterator[dict[str, float]]) -> None:
    """A side's end of it; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for found in rounds:
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        if not sys.stdin.readline():
            break


def compare(arguments: argparse.Namespace) -> None:
    peers = {side: Peer(arguments, side) for side in SIDES}
    found: dict[str, list[dict[str, float]]] = {"raw": [], "server": [], "in process": []}
    with asyncio.Runner() as runner:
        sampler = runner.run(open_ours(arguments, "vllm_server", f"servers.python={arguments.vllm}"))
        try:
            for number in range(arguments.rounds + 1):
                for side in found:
                    if side in peers:
                        one = peers[side].round()
                    else:
                        others, before = sum(cpu_of(peer.pid) for peer in peers.values()), cpu_of(os.getpid())
                        one = runner.run(play(arguments, sampler, number))
                        rest = sum(cpu_of(peer.pid) for peer in peers.values()) - others
                        one["all"] = cpu_of(os.getpid()) - before - rest
                    if number:  # the first warms up
                        found[side].append(one)
        finally:
            runner.run(sampler.close())
            for peer in peers.values():
                peer.close()
    turns = arguments.conversations * arguments.turns
    best = {side: max(one["tokens"] / one["seconds"] for one in rounds) for side, rounds in found.items()}
    print(f"{arguments.conversations} conversations of {arguments.turns} turns, {arguments.tokens} tokens each")
    for side, rounds in found.items():
        client = min(one["client"] for one in rounds) / turns * 1000 if side != "raw" else 0.0
        together = min(one["all"] for one in rounds) / turns * 1000
        print(
            f"  {side:10s} {best[side]:9,.0f} tokens/s  ratio {best[side] / best['raw']:.2f}   CPU of a turn: "
            f"client {client:.2f} ms, all {together:.2f} ms (by round, tokens/s: "
            + ", ".join(f"{one['tokens'] / one['seconds']:,.0f}" for one in rounds) + ")", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="the Python of an environment that has vLLM")
    parser.add_argument("--model", help="a Hugging Face folder; without one the bundled tiny model")
    parser.add_argument("--conversations", type=int, default=64, help="all at once (512 on a GPU)")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=150, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a policy's turn")
    parser.add_argument("--tool", type=int, default=16, help="tokens of what a tool says")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.25, help="share of a GPU's memory for each of the three")
    parser.add_argument("--max-lag", type=int, default=0, help="with 1, updates might come in the middle of turns")
    parser.add_argument("--seeds", action="store_true", help="give raw vLLM a seed for each turn, as ours has")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.vllm:
        print("not run: name --vllm (see --help); vLLM is not bundled")
        return
    if not arguments.model:
        arguments.model = str(ROOT / "turnwise" / "engines" / "bundled" / "tiny")
    if arguments.side:
        answer_rounds(raw(arguments) if arguments.side == "raw" else in_process(arguments))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
