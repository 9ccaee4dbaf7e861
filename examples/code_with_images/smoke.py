"""The whole launch in a minute on a CPU: tiny model and data, the rule judge over HTTP, the sandbox, TAPO, the board.

    python examples/code_with_images/smoke.py --out OUT

A cold start on scripted looks makes the random model write <code>; then launch.py trains it by the recipe, with
smoke.yaml as its machine. Nothing is replaced by a stand-in but the models' size.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import launch
import tiny

import turnwise as tw
from turnwise.cli import main as turnwise
from turnwise.engines.samplers.scripted import Script, ScriptRequest
from turnwise.environment import JUDGE
from turnwise.scoring.rule_judge import make_app
from turnwise.serving import serving_beside

FEW = (
    "board=false", "tracking.to=[console]", "training.steps=2", "training.eval_every=1", "training.group_size=4",
    "sampling.max_tokens=40", "sampling.temperature=0.6", "rollout.max_assistant_turns=3", "rollout.max_tokens=400",
    "learner.lr=1e-4",
)  # fmt: skip
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
    left, upper = (half * tiny.SIDE // 2 for half in tiny.corner(number))
    box = (left, upper, left + tiny.SIDE // 2, upper + tiny.SIDE // 2)
    return [f"<code>\nshow(img0.crop({box}))\n</code>", final]


@contextlib.contextmanager
def judge() -> Iterator[str]:
    """The rule judge on a free port of this machine, under the name that the recipe asks for; gives its address."""
    ready, found, end = threading.Event(), [], asyncio.Event()

    async def serve() -> None:
        async with serving_beside(make_app("judge"), "127.0.0.1") as port:
            found.append((asyncio.get_running_loop(), f"http://127.0.0.1:{port}/v1"))
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        ready.wait()
        yield found[0][1]
    finally:
        found[0][0].call_soon_threadsafe(end.set)
        thread.join()


def main() -> int:
    """Every part after the other; the first that fails ends it with its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("smoke"), help="everything is written here")
    out = parser.parse_args().out.resolve()
    words = "".join(text for number in range(8) for text in lines(number))
    model, data = tiny.make(out, words)
    runs = out / "runs"
    few = [*FEW, f"scoring.options.tapo.judge_options.cache='{out / 'verdicts'}'"]
    few.append(f"scoring.options.tapo.accuracy_options.cache='{out / 'verdicts'}'")
    taught = [*launch.overrides("smoke", runs, few), "run=cold_start", f"sft.script='{__file__}:script'", *COLD_START]
    recipe = ["--config", str(launch.RECIPE)]
    os.environ |= {"DATA_REPO": str(data), "BASE_MODEL_PATH": str(model)}
    with judge() as address:
        os.environ[JUDGE] = address
        for part in (
            lambda: turnwise(["judge", "check", *recipe, "--scorer", "tapo"]),
            lambda: print(tw.sft(tw.configure(*taught, config_file=launch.RECIPE))),
            lambda: launch.main(["smoke", "--save-path", str(runs), *few, f"model.path='{runs}/cold_start/policy'"]),
            lambda: turnwise(["report", str(runs / "codev_7b_smoke"), "--out", str(out / "board.html"), "--force"]),
        ):
            if code := part():
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
