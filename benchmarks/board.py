"""How quick the board is over a long run, and how much memory its server takes.

Writes a run of 2,000 steps with 50 trajectories each through the real writers (a few hundred distinct episodes with
tool calls, ledgers of real tokens and what a learner computed for them, used again with other steps, siblings and
rewards), starts `turnwise board` as its own process, and asks it over HTTP for everything a page asks. The peer is the
plain way to look at one trajectory, that of boards which read log files: all rows of the step's JSONL into pandas,
then the wanted one; its files hold the same words and numbers. Targets stand beside what was seen, nothing is asserted.

    python benchmarks/board.py [--steps 2000] [--per-step 50] [--requests 100] [--keep DIR]

`--keep DIR` writes the run into DIR and leaves it there; a DIR that holds it already is measured as it is.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

import turnwise
from turnwise.chat.formats import hermes
from turnwise.ledger import TokenTrainingData
from turnwise.storage.index import record
from turnwise.storage.run_dir import CONFIG, LOG, METRICS, PLAN, RunDir
from turnwise.storage.status import State, Status, write_status
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Ledger,
    Message,
    Origin,
    RenderCheck,
    Role,
    Sample,
    StopReason,
    Trajectory,
    Turn,
)

NAME = "long"
GROUP = 5
EVERY = 100
"""Steps between evaluations."""
PROBLEMS = 60
SOURCES = ("openai/gsm8k", "arithmetic", "math")
FIRST_PAGE, PAGE, MEMORY = 1.0, 0.3, 500.0
"""Targets: seconds, seconds, megabytes."""
TOKENIZER = Path(turnwise.__file__).parent / "engines" / "bundled" / "tiny" / "tokenizer.json"
STORY = "Each of the {n} boxes holds {m} pens, and {k} were given away on the first day. "
TIMINGS = ("step", "gen", "update_actor", "old_log_prob", "reward", "agent_loop/generate_sequences/mean")
CURVES = (
    "critic/score/mean,val/accuracy*,train/accuracy/*,reward_parts/*,actor/entropy,actor/ppo_kl,actor/kl_loss,"
    "response_length/mean,num_turns/mean,timing_s/*,perf/throughput,rollout_corr/abs_diff_mean,actor/grad_norm"
)
API = f"/api/runs/{NAME}"
Demand = tuple[str, dict[str, Any]]
FIRST: list[Demand] = [("/", {}), ("/api/runs", {}), (f"{API}/series", {"names": CURVES})]
"""What a browser that opens a run's curves waits for."""
AGAIN = 20
TRAJECTORY_PAGE = "trajectory page: trajectory + tokens"
LISTINGS = (
    {"sort": "step", "order": "desc"},
    {"filter": "malformed > 0", "sort": "reward", "order": "asc"},
    {"filter": "reward > 0 and right == false", "sort": "policy_tokens", "order": "desc"},
    {"filter": "group_std == 0 and group_size > 1", "sort": "sample_id", "order": "asc"},
    {"filter": 'part["format"] < 1 and tool("python")', "sort": "seconds", "order": "desc"},
    {"search": "12", "sort": "advantage", "order": "desc", "offset": "5000"},
)


def episode(problem: int, tokenizer: Tokenizer, draw: random.Random) -> Trajectory:
    """One or two turns with a call and its reply, and an answer: about 400 tokens, half of them the policy's."""
    given = random.Random(problem)
    n, m, k = (given.randint(2, 99) for _ in range(3))
    prompt = (
        Message(Role.SYSTEM, "Solve the problem step by step. Use the tools where they help. " * 3),
        Message(Role.USER, STORY.format(n=n, m=m, k=k) * 2 + "How many are left?"),
    )
    ledger, turns, messages = Ledger(), [], list(prompt)

    def write(text: str, origin: Origin, turn: int) -> int:
        ids = tokenizer.encode(text).ids
        if origin is Origin.POLICY:
            ledger.append(ids, origin, turn, [-draw.expovariate(4) for _ in ids], 0)
        else:
            ledger.append(ids, origin, turn)
        return len(ids)

    write("".join(message.text for message in prompt), Origin.PROMPT, 0)
    rounds = draw.randint(1, 2)
    for turn in range(rounds):
        before = len(ledger)
        code = draw.choice((f"print({n} * {m} - {k})", f"total = {n} * {m}\nprint(total - {k})", "print(12)"))
        said = STORY.format(n=n, m=m, k=k) * draw.randint(1, 3)
        call = json.dumps({"name": "python", "arguments": {"code": code}})
        message = hermes.parse(f"{said}<tool_call>\n{call}\n</tool_call>", turn=turn, in_reasoning=False)
        written = write(message.text, Origin.POLICY, turn)
        status = draw.choices((CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT), (90, 8, 2))[0]
        text = str(n * m - k) if status is CallStatus.OK else "NameError: name 'total' is not defined"
        reply = Message(Role.TOOL, text, tool_call_id=message.tool_calls[0].id)
        write(text, Origin.TOOL, turn)
        calls = [CallRecord(message.tool_calls[0], status, draw.expovariate(20))]
        taken = Turn(turn, message, FinishReason.STOP, 0, before, written, 0, before, calls, [reply])
        taken.generate_seconds, taken.reply_seconds = draw.uniform(0.2, 2.0), calls[0].seconds
        turns.append(taken)
        messages += [message, reply]
    before = len(ledger)
    answer = hermes.parse(STORY.format(n=n, m=m, k=k) * 2 + f"#### {n * m - k}", turn=rounds, in_reasoning=False)
    written = write(answer.text, Origin.POLICY, rounds)
    turns.append(Turn(rounds, answer, FinishReason.STOP, 0, before, written, 0, before, generate_seconds=0.7))
    ledger.training = learned(ledger, draw)
    sample = Sample(f"s{problem}", prompt, SOURCES[problem % len(SOURCES)], str(n * m - k))
    said = [*messages, answer]
    one = Trajectory(sample, 0, 0, said, turns, [ledger], StopReason.ANSWERED, draw.uniform(1.0, 6.0))
    one.render_check = RenderCheck(True, True)
    return one


def learned(ledger: Ledger, draw: random.Random) -> TokenTrainingData:
    """Numbers for the policy's tokens, as training leaves them."""
    own = ledger.loss_mask
    noise = [[draw.gauss(0, width) if mine else 0.0 for mine in own] for width in (0.01, 0.05, 1.0)]
    ours, new = ([a + b for a, b in zip(ledger.logprobs, one, strict=True)] for one in noise[:2])
    entropies = [draw.expovariate(3) if mine else 0.0 for mine in own]
    return TokenTrainingData(logprobs=ours, new_logprobs=new, entropies=entropies, advantages=noise[2])


def step_of(pool: Sequence[Trajectory], step: int, count: int, steps: int, draw: random.Random) -> list[Trajectory]:
    """The trajectories of one step: groups of siblings, right more often the later, a few of them lost or cut."""
    found: list[Trajectory] = []
    for number in range(count):
        sibling = number % GROUP
        if sibling == 0:
            problem = draw.randrange(PROBLEMS)
            sample = replace(pool[problem * GROUP].sample, id=f"train:{problem + PROBLEMS * draw.randrange(100)}")
        one = replace(pool[problem * GROUP + sibling], sample=sample, sibling=sibling, step=step)
        luck = draw.random()
        if luck < 0.01:
            one.stop_reason, one.failure = StopReason.FAILED, "the sandbox could not be reached"
        else:
            right = draw.random() < 0.3 + 0.5 * step / steps
            one.parts = {"acc": float(right), "format": float(draw.random() < 0.95)}
            one.reward = 0.9 * one.parts["acc"] + 0.1 * one.parts["format"]
            one.advantage = one.reward - 0.55
            one.stop_reason = StopReason.TURN_TRUNCATED if luck < 0.04 else StopReason.ANSWERED
        found.append(one)
    return found


def metrics_of(step: int, steps: int, draw: random.Random) -> dict[str, float]:
    """About as many names as a run writes."""
    done = step / steps
    found = {f"timing_s/{name}": draw.uniform(1, 5) for name in TIMINGS}
    found |= {f"train/accuracy/{name}": 0.3 + 0.5 * done for name in SOURCES}
    found |= {f"stop_reasons/{reason.value}": draw.uniform(0, 9) for reason in StopReason}
    found |= {f"tool_calls/{status.value}": draw.uniform(0, 9) for status in CallStatus}
    for name in ("critic/score", "critic/advantages", "response_length", "num_turns", "prompt_length"):
        found |= {f"{name}/{what}": draw.gauss(0.5 + done, 0.05) for what in ("mean", "max", "min")}
    found |= {"reward_parts/acc": 0.3 + 0.5 * done, "reward_parts/format": draw.uniform(0.9, 1.0)}
    found |= {"actor/entropy": draw.gauss(0.4 - 0.2 * done, 0.01), "actor/ppo_kl": draw.expovariate(1000)}
    found |= {"actor/kl_loss": 0.05 * done, "actor/grad_norm": draw.uniform(0.1, 0.3)}
    return found | {"rollout_corr/abs_diff_mean": draw.uniform(0.008, 0.01), "perf/throughput": draw.uniform(3e3, 4e3)}


def write_run(run: RunDir, steps: int, per_step: int, console: Console) -> None:
    """A whole run, evaluations included, through the writers that training uses."""
    draw = random.Random(0)
    shutil.copy(TOKENIZER, run.path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    pool = [episode(problem, tokenizer, draw) for problem in range(PROBLEMS) for _ in range(GROUP)]
    run.write_text(CONFIG, f"task: arithmetic\nmodel:\n  path: tiny\ntraining:\n  steps: {steps}\n")
    run.write_text(PLAN, "written by benchmarks/board.py\n")
    run.write_text(LOG, "")
    tokens = 0
    for step in track(range(steps), "writing the run", console=console):
        trajectories = step_of(pool, step, per_step, steps, draw)
        record(run, f"trajectories/step_{step:06d}.parquet", trajectories)
        tokens += sum(len(ledger) for one in trajectories for ledger in one.segments)
        head = {"step": step + 1, "seconds": 10.0 * (step + 1), "tokens": tokens}
        run.append_jsonl(METRICS, head | metrics_of(step, steps, draw))
        if step % EVERY == EVERY - 1:
            judged = step_of(pool, step + 1, per_step, steps, draw)
            judged = [replace(one, first_right=draw.random() < 0.5) for one in judged]
            record(run, f"eval/step_{step + 1:06d}.parquet", judged)
            run.append_jsonl(METRICS, head | {"val/accuracy": 0.3 + 0.5 * step / steps})
    write_status(run, Status.beginning("train", steps).at(steps).ended(State.FINISHED, "all steps done"))


@contextlib.contextmanager
def serving(runs: Path) -> Iterator[tuple[int, str, float]]:
    """The board over a folder of runs: its pid, its URL, when it was started. It is gone after the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "turnwise.commands.cli", "board", str(runs), "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(turnwise.__file__).parent.parent)
    try:
        while process.poll() is None:  # the waiting is part of what is measured
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.002)
        else:
            raise SystemExit("the board ended before it answered")
        yield process.pid, f"http://127.0.0.1:{port}", started
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Row:
    """One line of the table: what, seconds of each request, the server's CPU seconds for all, the target in seconds."""

    what: str
    seconds: list[float]
    cpu: float
    target: float | None

    def cells(self) -> list[str]:
        taken = sorted(self.seconds)
        p50, p99 = (taken[math.ceil(share * len(taken)) - 1] for share in (0.5, 0.99))
        times = [f"{1000 * one:.1f} ms" for one in (p50, p99, self.cpu / len(taken))]
        if self.target is None:
            return [self.what, *times, "", ""]
        return [self.what, *times, f"{1000 * self.target:.0f} ms", "yes" if p99 <= self.target else "NO"]


@dataclass(frozen=True)
class Meter:
    """Asks the board and looks at the clock, and at the server's own: on a busy machine the two differ."""

    client: httpx.Client
    pid: int

    def cpu(self) -> float:
        """CPU seconds of the server since it was started."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, path: str, **params: str | int) -> Any:
        """The answer."""
        answer = self.client.get(path, params=params)
        if answer.status_code != 200:
            raise SystemExit(f"{answer.url}: {answer.status_code} {answer.text[:300]}")
        return answer.json() if answer.headers["content-type"].startswith("application/json") else answer.text

    def row(self, what: str, pages: Sequence[Sequence[Demand]], target: float | None) -> Row:
        """Each page is some requests, one after the other."""
        seconds, before = [], self.cpu()
        for page in pages:
            start = time.perf_counter()
            for path, params in page:
                self.ask(path, **params)
            seconds.append(time.perf_counter() - start)
        return Row(what, seconds, self.cpu() - before, target)


def measure(meter: Meter, requests: int, draw: random.Random) -> Iterator[Row]:
    """Every path of a run that a page asks for, over random files."""
    yield meter.row("first page, warm server", [FIRST] * AGAIN, FIRST_PAGE)
    yield meter.row("listing, the first one", [[(f"{API}/trajectories", {})]], None)
    before, start = meter.cpu(), time.perf_counter()
    while meter.ask(f"{API}/trajectories", limit=1)["pending"]:
        pass
    yield Row("the rest of the table, read in slices", [time.perf_counter() - start], meter.cpu() - before, None)
    yield meter.row("run", [[(API, {})]] * AGAIN, PAGE)
    yield meter.row("series of the default curves", [FIRST[-1:]] * AGAIN, PAGE)
    shards = [(one["shard"], one["size"]) for one in meter.ask(API)["shards"] if one["split"] == "train"]
    places = [{"shard": shard, "row": draw.randrange(size)} for shard, size in draw.choices(shards, k=requests)]
    for name in ("trajectory", "tokens"):
        yield meter.row(name, [[(f"{API}/{name}", place)] for place in places], PAGE)
    draw.shuffle(places)
    both = [[(f"{API}/trajectory", place), (f"{API}/tokens", place)] for place in places]
    yield meter.row(TRAJECTORY_PAGE, both, PAGE)
    samples = [meter.ask(f"{API}/trajectory", **place)["entry"]["sample_id"] for place in places]
    pairs = [{"shard": place["shard"], "sample": sample} for place, sample in zip(places, samples, strict=True)]
    yield meter.row("group", [[(f"{API}/group", pair)] for pair in pairs], PAGE)
    for params in LISTINGS:
        what = " ".join(f"{name}={value}" for name, value in params.items())
        yield meter.row(f"listing {what}", [[(f"{API}/trajectories", params)]] * AGAIN, PAGE)
    for text in ("pens", "no such words"):
        yield meter.row(f"search for {text!r}, one slice", [[(f"{API}/search", {"text": text})]] * AGAIN, PAGE)
    for name in ("fields", "config", "tools", "spread", "health"):
        yield meter.row(name, [[(f"{API}/{name}", {})]] * AGAIN, PAGE)


def memory(pid: int) -> tuple[float, float]:
    """Megabytes: resident, and its fair share where pages are shared."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1000 * 1.024 for line in lines[1:]}
    return found["Rss"], found["Pss"]


def peer(run: RunDir, shards: Sequence[str], folder: Path) -> list[tuple[float, float]]:
    """(seconds, CPU seconds) for one trajectory the plain way; writing the step's JSONL is not counted."""
    import pandas

    from turnwise.storage.trajectories.files import read_trajectories

    taken = []
    for shard in shards:
        path = folder / "step.jsonl"
        rows = [as_logged(one) for one in read_trajectories(run.path / f"{shard}.parquet")]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        wanted, start, cpu = rows[len(rows) // 2], time.perf_counter(), time.process_time()
        with path.open(encoding="utf-8") as file:
            table = pandas.DataFrame([json.loads(line) for line in file])
        here = (table["sample_id"] == wanted["sample_id"]) & (table["sibling"] == wanted["sibling"])
        json.dumps(table[here].iloc[0].to_dict(), default=str)
        taken.append((time.perf_counter() - start, time.process_time() - cpu))
    return taken


def as_logged(one: Trajectory) -> dict[str, Any]:
    """A row as such logs have it: the words, and the numbers of every token."""
    ledger, asked = one.segments[0], len(one.sample.prompt)
    texts = [message.text for message in one.messages]
    row = {
        "step": one.step,
        "sample_id": one.sample.id,
        "sibling": one.sibling,
        "ground_truth": one.sample.ground_truth,
    }
    row |= {"prompt": "\n".join(texts[:asked]), "response": "\n".join(texts[asked:])}
    row |= {"reward": one.reward, "parts": one.parts, "tokens": ledger.token_ids.tolist()}
    row |= {"mask": ledger.loss_mask.tolist(), "logprobs": ledger.logprobs.tolist()}
    training = asdict(ledger.training or TokenTrainingData())
    return row | {name: None if values is None else values.tolist() for name, values in training.items()}


def bench(runs: Path, args: argparse.Namespace, console: Console) -> None:
    """Make or find the run, start the board, ask it, print the table."""
    run = RunDir(runs / NAME)
    if not (run.path / CONFIG).is_file():
        run.path.mkdir(parents=True)
        write_run(run, args.steps, args.per_step, console)
    draw = random.Random(1)
    table = Table("request", "p50", "p99", "server CPU", "target", "p99 met", title="the board over HTTP")
    load = os.getloadavg()[0]
    with serving(runs) as (pid, url, started), httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        meter = Meter(client, pid)
        meter.row("", [FIRST], None)
        rows = [
            Row("first page, from the start of the process", [time.perf_counter() - started], meter.cpu(), FIRST_PAGE)
        ]
        rows += measure(meter, args.requests, draw)
        resident, share = memory(pid)
        shards = [one["shard"] for one in meter.ask(API)["shards"] if one["split"] == "train"]
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    console.print(
        f"load average at the start {load:.1f} on {os.cpu_count()} cores; above that all but the CPU is waiting"
    )
    seen = f"{resident:.0f} MB resident, {share:.0f} MB its share"
    console.print(f"server memory: {seen}; target {MEMORY:.0f} MB: {'met' if resident <= MEMORY else 'NOT met'}")
    with tempfile.TemporaryDirectory() as folder:
        plain = peer(run, draw.choices(shards, k=min(30, args.requests)), Path(folder))
    page = next(row for row in rows if row.what == TRAJECTORY_PAGE)
    theirs, ours = median(one for one, _ in plain), median(page.seconds)
    busy, ours_busy = sum(cpu for _, cpu in plain) / len(plain), page.cpu / len(page.seconds)
    console.print(
        f"one trajectory with its tokens: {1000 * ours:.1f} ms (CPU {1000 * ours_busy:.1f}); the peer, without HTTP: "
        f"{1000 * theirs:.1f} ms (CPU {1000 * busy:.1f}); ratio {theirs / ours:.2f} (CPU {busy / ours_busy:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--per-step", type=int, default=50)
    parser.add_argument("--requests", type=int, default=100, help="random files asked for")
    parser.add_argument("--keep", type=Path, help="write the run into this folder and leave it there")
    args = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        bench((args.keep or Path(folder)).absolute(), args, console)


if __name__ == "__main__":
    main()
