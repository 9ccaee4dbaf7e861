"""The whole launch in a minute on a CPU: tiny model and data, the rule judge over HTTP, the sandbox, TAPO, the board.

    python examples/code_with_images/smoke.py --out OUT
    python examples/code_with_images/smoke.py --out OUT cluster=ray ray.samplers=2    # rollout workers are Ray's actors

A cold start on scripted looks makes the random model write <code>; then launch.py trains it by the recipe, with
smoke.yaml as its machine. Nothing is replaced by a stand-in but the models' size.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import launch
import rich
import tiny

import turnwise as tw
from turnwise.commands.cli import main as turnwise
from turnwise.engines.samplers.scripted import Script, ScriptRequest
from turnwise.ext.judge.environment import JUDGE
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.system.plugins import load
from turnwise.system.serving import serving_beside
from turnwise.types import Image, Message, Role

rule_judge = load(f"{Path(__file__).parents[1]}/rule_judge/serve.py:make_app", "judge")
FEW = (
    "board.live=false", "tracking.to=[console]", "training.steps=2", "training.eval_every=1", "training.group_size=4",
    "sampling.max_tokens=40", "sampling.temperature=0.6", "rollout.max_assistant_turns=3", "rollout.max_tokens=400",
    "learner.lr=1e-4",
)  # fmt: skip
COUNTED = ("tool_calls/ok", "tool_calls/error", "tool_calls/malformed", "judge/requests")
COLD_START = ("sft.steps=50", "sft.lr=1e-2", "sft.warmup=5", "sft.batch_tokens=2400", "training.save_every=0")


def script(seed: int) -> Script:
    """What somebody says who knows where to look: one crop where the square is asked for, none where discs are."""
    said = {f"train:{number}": lines(number) for number in range(6)}

    def say(request: ScriptRequest) -> str:
        mine = said[request.noise.sample]
        return mine[min(request.turn, len(mine) - 1)]

    return say


def lines(number: int) -> list[str]:
    """The turns of a row's conversation."""
    _, answer, _ = tiny.scene(number)
    final = f"<answer>{answer}</answer>"
    if number % 2:
        return [final]
    return [f"<code>\nshow(img0.crop({tiny.QUARTER}))\n</code>", final]


@contextlib.contextmanager
def judge() -> Iterator[str]:
    """The rule judge on a free port of this machine, under the name that the recipe asks for; gives its address."""
    address: Future[str] = Future()
    end = threading.Event()

    async def serve() -> None:
        try:
            async with serving_beside(rule_judge("judge"), "127.0.0.1") as port:
                address.set_result(f"http://127.0.0.1:{port}/v1")
                await asyncio.to_thread(end.wait)
        except OSError as error:  # no port can be had
            address.set_exception(error)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, serve())
        try:
            yield address.result()
        finally:
            end.set()


def summary(run: Path) -> str:
    """What the two steps came to, from the run's own files."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [one for one in steps if "actor/grad_norm" in one]
    total = {name: int(sum(one.get(name, 0) for one in steps)) for name in COUNTED}
    episodes = [one for file in sorted((run / "trajectories").glob("*.parquet")) for one in read_trajectories(file)]
    images = sum(len(span) for one in episodes for turn in one.turns for span in map(shown, turn.replies))
    failed = total["tool_calls/error"] + total["tool_calls/malformed"]
    return (
        f"{len(steps)} steps, {len(episodes)} episodes: {total['tool_calls/ok']} programs ran and showed the model "
        f"{images} images, {failed} failed; the judge was sent {total['judge/requests']} requests, "
        f"{steps[-1]['judge/requests_left']:,.0f} are left of its budget"
    )


def shown(reply: Message) -> list[Image]:
    """The images of a tool's reply."""
    parts = () if isinstance(reply.content, str) or reply.role is not Role.TOOL else reply.content
    return [part for part in parts if isinstance(part, Image)]


def main() -> int:
    """Every part after the other; the first that fails ends it with its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("smoke"), help="everything is written here")
    parser.add_argument("given", nargs="*", metavar="key=value", help="config values of the training")
    args = parser.parse_intermixed_args()
    out = args.out.resolve()
    words = "".join(text for number in range(8) for text in lines(number))
    model, data = tiny.make(out, words)
    runs = out / "runs"
    few = [*FEW, f"scoring.options.tapo.judge_options.cache='{out / 'verdicts'}'"]
    few.append(f"scoring.options.tapo.accuracy_options.cache='{out / 'verdicts'}'")
    taught = [*launch.overrides("smoke", runs, few), "run=cold_start", f"sft.script='{__file__}:script'", *COLD_START]
    recipe = ["--config", str(launch.RECIPE)]
    learnt = runs / "cold_start" / "policy"
    os.environ |= {"DATA_REPO": str(data), "BASE_MODEL_PATH": str(model), "VLLM_MODEL_PATH": str(model)}
    with judge() as address:
        os.environ[JUDGE] = address
        for part in (
            lambda: turnwise(["judge", "check", *recipe, "--scorer", "tapo"]),
            lambda: rich.print(tw.sft(tw.configure(*taught, config_file=launch.RECIPE))),
            lambda: launch.main(["smoke", "--save-path", str(runs), *few, f"model.path='{learnt}'", *args.given]),
            lambda: turnwise(["report", str(runs / "codev_7b_smoke"), "--out", str(out / "board.html"), "--force"]),
        ):
            if code := part():
                return code
    print(summary(runs / "codev_7b_smoke"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
