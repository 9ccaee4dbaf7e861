"""A real browser before a real board: a run that grows, the server as a process, and pages that must stay clean."""

import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
from looking import write_looked, write_probed

from turnwise.ledger import TokenTrainingData
from turnwise.reports.evaluation import EpisodeResult, EvalReport, measured, summarise
from turnwise.storage.index import record
from turnwise.storage.run_dir import WARNINGS, RunDir
from turnwise.storage.status import State, Status, write_status
from turnwise.system.metrics import Share
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
    ToolCall,
    Trajectory,
    Turn,
)

ROOT = Path(__file__).parents[4]
TOKENIZER = ROOT / "turnwise/engines/bundled/tiny/tokenizer.json"
REQUIRED = os.environ.get("TURNWISE_BROWSER") == "required"
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--no-first-run"]  # fmt: skip
PATIENCE = 60_000
"""Milliseconds to wait for what should come at once: other tests may have all cores."""
SERVE = (
    "import sys; from pathlib import Path; from turnwise.ext.board.serve import serve; "
    "serve([Path(sys.argv[1])], '127.0.0.1', 0, None, ready=lambda url: print(url, flush=True))"
)
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<svg onload=window.hacked=3></svg>\u202egnorw\u202c [click](javascript:window.hacked=4) \x1b[31m{{7*7}}"
)


def absent(what):
    """Skip, or fail where a browser is required."""
    message = f"{what} is not here, so the board is not tried in a browser"
    if REQUIRED:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="module")
def browser():
    """One per file: while Playwright runs, its event loop does, and no other test of the session could use asyncio."""
    try:
        from playwright.sync_api import expect, sync_playwright
    except ModuleNotFoundError:
        absent("playwright")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        absent("chromium")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=ARGS, timeout=2 * PATIENCE)
        yield opened
        opened.close()


@dataclass
class GrowingRun:
    """A run that writes as training does; `grow` adds a step."""

    run: RunDir
    random: Random = field(default_factory=lambda: Random(7))
    step: int = 0
    tokens: int = 0

    def __post_init__(self):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.status = Status.beginning("train", steps=40)
        self.run.write_text("config.yaml", "task: arithmetic\nmodel:\n  path: tiny\ntraining:\n  steps: 40\n")
        self.run.write_text("plan.txt", "arithmetic -> tool_calling\n")
        shutil.copy(TOKENIZER, self.run.path / "tokenizer.json")

    def grow(self, hostile=False, again=False):
        self.step += 1
        step = self.step
        made = [self.trajectory(f"train:{step * 4 + n}", sibling) for n in range(4) for sibling in range(4)]
        if hostile:
            made += [self.trajectory(f"evil:{HOSTILE}", sibling, HOSTILE) for sibling in range(2)]
        record(self.run, f"trajectories/step_{step:06d}.parquet", made)
        if again:
            twice = [replace(one, reused_from=step - 1) for one in made[:2]]
            record(self.run, f"reused/step_{step:06d}.parquet", twice)
        rewards = [t.reward for t in made if t.reward is not None]
        self.tokens += 1000
        line = {"step": step, "seconds": 10.0 * step, "tokens": self.tokens}
        line |= {"critic/score/mean": sum(rewards) / len(rewards), "critic/score/max": 1.0, "critic/score/min": 0.0}
        line |= {"train/accuracy/arithmetic": sum(rewards) / len(rewards), "reward_parts/arithmetic/acc": 0.5}
        line |= {"actor/entropy": 1.0 / (1 + step), "actor/ppo_kl": 0.001 * step, "response_length/mean": 40.0 + step}
        line |= {"response_length/max": 60.0, "response_length/min": 20.0, "num_turns/mean": 2.0, "timing_s/gen": 1.0}
        fresh = 1 / step  # ever more tokens are a step old
        line |= {"staleness/mean": 1 - fresh, "staleness/max": 1.0, "staleness/min": 0.0, "staleness/left_out": 0.0}
        line |= {"staleness/age_0": fresh, "staleness/age_1": 1 - fresh, "groups/waited_for": 1.0, "replay/groups": 2.0}
        line |= {"timing_s/step": 2.5, "perf/throughput": 400.0, "actor/grad_norm": 0.5}
        self.run.append_jsonl("metrics.jsonl", line)
        if step % 5 == 0:
            record(self.run, f"eval/step_{step:06d}.parquet", [self.trajectory(f"test:{n}", 0) for n in range(8)])
            share = Share(0.5 + step / 100, 0.1, 8, 8)
            found = measured("accuracy", share) | measured("accuracy", share, "arithmetic")
            values = {f"val/{name}": value for name, value in found.items()}
            self.run.append_jsonl(
                "metrics.jsonl", {"step": step, "seconds": 10.0 * step, "tokens": self.tokens} | values
            )
        # it must not look stalled, however long the tests take
        self.status = replace(self.status.at(step), updated=time.time() + 3600)
        write_status(self.run, self.status)

    def finish(self):
        write_status(self.run, self.status.ended(State.FINISHED, "all steps"))

    def trajectory(self, name, sibling, evil=""):
        a, b = self.random.randint(2, 99), self.random.randint(2, 99)
        right = self.random.random() < 0.6
        ids = self.tokenizer.encode
        prompt = (Message(Role.SYSTEM, "Use the tool."), Message(Role.USER, f"What is {a} * {b}? {evil}"))
        call = ToolCall("t000c0000", f"calculate{evil}", {"expression": f"{a} * {b} {evil}"})
        spoken = Message(
            Role.ASSISTANT, f"I multiply. {evil}", (call,), reasoning=f"thinking {evil}", answer="I multiply."
        )
        reply = Message(Role.TOOL, f"{a * b} {evil}", tool_call_id=call.id, name=call.name)
        final = Message(Role.ASSISTANT, f"It is {a * b if right else a + b}. {evil}", answer=f"It is {a * b} {evil}")
        ledger = Ledger()
        pieces = [(prompt[1].text, Origin.PROMPT, 0), (spoken.text, Origin.POLICY, 0), (reply.text, Origin.TOOL, 0)]
        for text, origin, turn in [*pieces, ("\n", Origin.TEMPLATE, 1), (final.text, Origin.POLICY, 1)]:
            tokens = ids(text).ids
            own = [-self.random.random() for _ in tokens] if origin is Origin.POLICY else None
            ledger.append(tokens, origin, turn, own, None if own is None else turn)
        mask = ledger.loss_mask
        spread = [self.random.random() if on else 0.0 for on in mask]
        ledger.training = TokenTrainingData(
            logprobs=[p - 0.01 * s for p, s in zip(ledger.logprobs, spread, strict=True)],
            new_logprobs=[p + 0.1 * s for p, s in zip(ledger.logprobs, spread, strict=True)],
            entropies=spread,
            advantages=[math.copysign(s, 1 if right else -1) for s in spread],
        )
        counts = [int((mask & (ledger.turns == turn)).sum()) for turn in (0, 1)]
        status = self.random.choice([CallStatus.OK, CallStatus.OK, CallStatus.ERROR])
        turns = [
            Turn(0, spoken, FinishReason.STOP, self.step, 30, counts[0], calls=[CallRecord(call, status, 0.02)], replies=[reply], generate_seconds=0.5),
            Turn(1, final, FinishReason.STOP, self.step, 60, counts[1], generate_seconds=0.4),
        ]  # fmt: skip
        failed = evil and sibling == 1
        return Trajectory(
            sample=Sample(name, prompt, f"arithmetic{evil}", str(a * b), info={f"note{evil}": evil}),
            sibling=sibling,
            step=self.step,
            messages=[*prompt, spoken, reply, final],
            turns=turns,
            segments=[ledger],
            stop_reason=StopReason.FAILED if failed else StopReason.ANSWERED,
            seconds=1.0,
            failure=f"the sandbox died {evil}" if failed else None,
            render_check=RenderCheck(True, True),
            reward=None if failed else float(right),
            parts={} if failed else {f"acc{evil}" if evil else "acc": float(right)},
            advantage=None if failed else (0.5 if right else -0.5),
            artifacts={"verdict": evil} if evil else {},
        )


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def growing(runs_folder):
    """Twelve steps at first, the last of them with hostile transcripts."""
    (runs_folder / "live").mkdir()
    run = GrowingRun(RunDir(runs_folder / "live"))
    for step in range(1, 13):
        run.grow(hostile=step == 12)
    run.run.write_json("notes.json", {"note": HOSTILE, "tags": ["baseline", "<img src=x onerror=hacked=5>"]})
    run.run.append_jsonl(WARNINGS, {"step": 12, "text": f"no learning signal {HOSTILE}"})
    return run


@pytest.fixture(scope="session")
def other(runs_folder):
    """A finished run, to compare with."""
    (runs_folder / "other").mkdir()
    run = GrowingRun(RunDir(runs_folder / "other"), Random(8))
    for _ in range(5):
        run.grow(again=True)
    run.finish()
    return run


@pytest.fixture(scope="session")
def evaluations(runs_folder):
    """Two finished evaluations of the same eight samples, and a run that died."""
    for name, seed in (("eval-a", 1), ("eval-b", 2)):
        (runs_folder / name).mkdir()
        run = GrowingRun(RunDir(runs_folder / name), Random(seed))
        made = [run.trajectory(f"test:{number}", 0) for number in range(8)]
        record(run.run, "eval/step_000000.parquet", made)
        graded = [EpisodeResult(one, one.right, one.right) for one in made]
        report = EvalReport(run.run.path, 2.0, 90.0, {"arithmetic": summarise("arithmetic", graded)}, made)
        run.run.write_json("eval/step_000000.json", report.as_json())
        write_status(run.run, Status.beginning("eval").ended(State.FINISHED, ""))
    (runs_folder / "dead").mkdir()
    run = GrowingRun(RunDir(runs_folder / "dead"))
    write_status(run.run, replace(run.status, pid=2**22 + 1))
    run.run.log("the last thing it said")


@contextmanager
def serving(folder):
    """The address of a board over the runs of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), url
        yield url.rstrip("/")
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="session")
def board(runs_folder, growing, other, evaluations):
    """The address of a board over all these runs."""
    with serving(runs_folder) as url:
        yield url


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    """A folder with two runs that looked at pictures: `looked`, whose second episode is hostile, and a probe."""
    folder = tmp_path_factory.mktemp("pictured")
    for name, write in (("looked", lambda run: write_looked(run, HOSTILE)), ("probed", write_probed)):
        (folder / name).mkdir()
        run = RunDir(folder / name)
        write(run)
        write_status(run, Status.beginning("probe" if name == "probed" else "train").ended(State.FINISHED, ""))
    return folder


@pytest.fixture(scope="module")
def picture_board(pictured):
    with serving(pictured) as url:
        yield url


@dataclass
class Watch:
    """What a page said and asked for while it was open."""

    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def listen(self, page):
        page.on(
            "console", lambda message: self.said.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog {dialog.message}"), dialog.dismiss()))

    def check(self, allowed):
        unexpected = [text for text in self.said if not any(part in text for part in self.expected)]
        assert unexpected == [], "the console has something to say"
        elsewhere = [url for url in self.asked if not url.startswith(allowed)]
        assert elsewhere == [], "something was asked of another place"


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def open_page(browser, board, watch):
    """Opens a page of the board; when the test ends nothing may have been logged and no other host asked."""
    contexts = []

    def open_(path="", width=1280, theme="light", **options):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce", **options
        )
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        watch.listen(page)
        page.goto(f"{board}/{path}")
        page.wait_for_selector("main:not([aria-busy]) h1", state="attached")
        return page

    yield open_
    hacked = [page.evaluate("window.hacked ?? null") for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    assert hacked == [None] * len(hacked), "a transcript was run"
    watch.check((f"{board}/", "data:", "blob:"))
