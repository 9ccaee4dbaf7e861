"""A real vLLM server and engine with the bundled model: its log-probs, stops and versions, updates in the middle of a
turn, its death, and trainings whose next tokens come from the new weights."""

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_servers import children, is_there
from safetensors.torch import load_file, save_file

from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.data.task_config import configure
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.open_in_process import open_learner
from turnwise.engines.opener import LearnerParts, model_source
from turnwise.engines.publish_weights import make_update
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.weight_updates import Adapter, WeightsFolder
from turnwise.errors import EngineLost
from turnwise.ext.servers.replicas import Replicas
from turnwise.rollout.prepare import make_renderer
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import Completion, FinishReason, Origin, VersionRun

ROOT = Path(__file__).parents[4]
CLOSE = 2e-4
"""Of log-probs: two programs that add in another order."""
END = 2
PROMPT = [1, 320, 45, 600, 77, 5, 9, 33]
LONG = 1500
"""Tokens of a turn that is still written when the next weights come, on a quick machine too."""


def request(ids: list[int], seed: int = 0, **params: Any) -> Request:
    return Request("c", np.array(ids), SamplingParams(**{"max_tokens": 24} | params), NoiseKey(seed, 0, "s", 0))


def logprobs_with(
    tensors: dict[str, torch.Tensor], prompt: list[int], ids: list[int], temperature: float
) -> list[float]:
    """What plain transformers says of these tokens, with these weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_source(configure()).folder, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def bundled() -> dict[str, torch.Tensor]:
    return load_file(model_source(configure()).folder / "model.safetensors")


def changed(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: one + 0.02 * torch.randn(one.shape, generator=noise) for name, one in bundled().items()}


def written(place: Path, tensors: dict[str, torch.Tensor]) -> WeightsFolder:
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    return WeightsFolder(place)


def check(found: Completion, weights: dict[int, dict[str, torch.Tensor]], temperature: float = 1.0) -> None:
    """Every token has the log-prob of the weights whose version it carries, and not that of others."""
    ids, at = found.token_ids.tolist(), 0
    for run in found.versions:
        part = slice(at, at + run.tokens)
        for version, tensors in weights.items():
            wanted = np.array(logprobs_with(tensors, PROMPT, ids, temperature)[part])
            gap = np.abs(wanted - found.logprobs[part]).max()
            assert (gap < CLOSE) == (version == run.version), (run, version, gap)
        at += run.tokens


def descendants(process: int) -> list[int]:
    """Children before their own."""
    found, queue = list[int](), [process]
    while queue:
        made = children(queue.pop())
        found += made
        queue += made
    return found


async def first_turns(sampler: Replicas, renderer: Renderer) -> None:
    assert sampler.context_length == 2048
    base = bundled()
    for temperature in (1.0, 0.6):
        found = await sampler.generate(request(PROMPT, temperature=temperature))
        gaps = np.abs(np.array(logprobs_with(base, PROMPT, found.token_ids.tolist(), temperature)) - found.logprobs)
        assert gaps.max() < CLOSE
    again = [await sampler.generate(request(PROMPT, seed)) for seed in (1, 1, 2)]
    assert again[0].token_ids.tolist() == again[1].token_ids.tolist() != again[2].token_ids.tolist()
    greedy = await sampler.generate(request(PROMPT, temperature=0.0))
    ours = (await open_sampler(configure("engine=torch"), renderer, lambda text: None)).sampler
    try:
        expected = await ours.generate(request(PROMPT, temperature=0.0))
    finally:
        await ours.close()
    assert greedy.token_ids.tolist() == expected.token_ids.tolist()
    assert np.abs(greedy.logprobs - expected.logprobs).max() < CLOSE
    third = expected.token_ids.tolist()[2]
    stopped = await sampler.generate(request(PROMPT, temperature=0.0, stop_ids=frozenset({third})))
    assert stopped.token_ids.tolist() == expected.token_ids.tolist()[:3] or third in expected.token_ids.tolist()[:2]
    assert stopped.finish_reason is FinishReason.STOP and stopped.token_ids[-1] == third
    word = renderer.tokenizer.decode([third])
    by_text = await sampler.generate(request(PROMPT, temperature=0.0, stop_strings=(word,)))
    assert by_text.finish_reason is FinishReason.STOP and word in renderer.tokenizer.decode(by_text.token_ids.tolist())
    assert word not in renderer.tokenizer.decode(by_text.token_ids.tolist()[:-1])
    many = await asyncio.gather(*(sampler.generate(request([*PROMPT * 40, seed], seed)) for seed in range(40)))
    assert all(len(one.token_ids) for one in many)


async def updates(sampler: Replicas, config: Config, renderer: Renderer, place: Path) -> None:
    weights = {1: changed(1), 2: changed(2)}
    first, second = (written(place / str(number), weights[number]) for number in (1, 2))
    await sampler.publish(first, 1)
    turn = asyncio.create_task(sampler.generate(request(PROMPT, max_tokens=LONG)))
    await asyncio.sleep(0.3)
    await sampler.publish(second, 2)
    found = await turn
    assert [run.version for run in found.versions] == [1, 2] and len(found.token_ids) == LONG
    check(found, weights)
    parts = LearnerParts(updates=1)
    learner = open_learner(config, renderer, parts)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=noise)
    update = make_update(learner, sampler.capabilities, place / "adapter")
    assert isinstance(update, Adapter)
    await sampler.publish(written(place / "base", bundled()), 3)  # what the adapter stands on
    await sampler.publish(update, 4)
    merged = {name: tensor.clone() for name, tensor in learner.weights().tensors}
    check(await sampler.generate(request(PROMPT)), {4: merged, 3: bundled()})
    await sampler.publish(written(place / "5", weights[1]), 5)
    check(await sampler.generate(request(PROMPT)), {5: weights[1], 4: merged})


async def death(sampler: Replicas) -> None:
    process: Any = sampler._seats[0].replica
    guard = process._process._guard.pid
    engines = [one for one in descendants(guard) if b"EngineCore" in Path(f"/proc/{one}/cmdline").read_bytes()]
    assert len(engines) == 1
    turn = asyncio.create_task(sampler.generate(request(PROMPT, max_tokens=LONG)))
    await asyncio.sleep(0.3)
    os.kill(engines[0], signal.SIGKILL)  # not the server itself
    with pytest.raises(EngineLost):
        await turn
    found = await sampler.generate(request(PROMPT))  # waits for the restart
    assert found.versions == (VersionRun(5, len(found.token_ids)),) and sampler.lost == 1
    check(found, {5: changed(1), 0: bundled()})


def test_a_server_writes_as_we_do_and_updates_of_every_kind_reach_the_next_token(
    vllm_python: str, tmp_path: Path
) -> None:
    config = configure(
        "engine=vllm_server", f"servers.python={vllm_python}", "learner.lora_rank=4", "training.max_lag=1"
    )
    renderer, said = make_renderer(config), list[str]()

    async def main() -> None:
        sampler = (await open_sampler(config, renderer, said.append)).sampler
        assert isinstance(sampler, Replicas)
        try:
            await first_turns(sampler, renderer)
            await updates(sampler, config, renderer, tmp_path)
            await death(sampler)
        finally:
            await sampler.close()

    asyncio.run(main())
    assert sum("serves at" in text for text in said) == 2


def test_turns_are_held_over_an_update_with_their_cache_made_anew_or_kept(vllm_python: str, tmp_path: Path) -> None:
    config = configure("engine=vllm_server", f"servers.python={vllm_python}", "training.max_lag=1")
    renderer, weights = make_renderer(config), {number: changed(number) for number in range(1, 5)}

    async def main() -> None:
        sampler = (await open_sampler(config, renderer, lambda text: None)).sampler
        assert isinstance(sampler, Replicas)
        server: Any = sampler._seats[0].replica
        try:
            for keeps, (before, after) in ((False, (1, 2)), (True, (3, 4))):
                server.keeps = keeps
                await sampler.publish(written(tmp_path / str(before), weights[before]), before)
                turn = asyncio.create_task(sampler.generate(request(PROMPT, max_tokens=LONG)))
                await asyncio.sleep(0.3)
                await sampler.publish(written(tmp_path / str(after), weights[after]), after)
                found = await turn
                assert [run.version for run in found.versions] == [before, after] and len(found.token_ids) == LONG
                check_held(found, {version: weights[version] for version in (before, after)}, exact=not keeps)
                check(await sampler.generate(request(PROMPT)), {after: weights[after], before: weights[before]})
        finally:
            await sampler.close()

    asyncio.run(main())


def check_held(found: Completion, weights: dict[int, dict[str, torch.Tensor]], *, exact: bool) -> None:
    """With a cache made anew every log-prob is of its version; with one that was kept, those behind the update are of
    both weights."""
    if exact:
        return check(found, weights)
    first = found.versions[0]
    ids = found.token_ids.tolist()
    gaps = {
        version: np.abs(np.array(logprobs_with(tensors, PROMPT, ids, 1.0)) - found.logprobs)
        for version, tensors in weights.items()
    }
    assert gaps[first.version][: first.tokens].max() < CLOSE
    assert min(gaps[version][first.tokens :].max() for version in weights) > CLOSE
    return None


SETTINGS = (
    "training.steps=2", "training.groups=4", "training.group_size=4", "training.eval_every=0", "training.save_every=1",
    "learner.lr=0.001", "run=live", "eval.samples=8", "training.max_lag=0",
)  # fmt: skip


def check_run(runs: Path) -> None:
    """The tokens of the second step have the log-probs of the first step's policy, and not those of the bundled one."""
    checkpoint = runs / "live" / "checkpoints" / "step_000001" / "policy" / "model.safetensors"
    first, base = load_file(checkpoint), bundled()
    gaps: dict[str, list[float]] = {"first": [], "base": []}
    for trajectory in list(read_trajectories(runs / "live" / "trajectories" / "step_000002.parquet"))[:4]:
        for ledger in trajectory.segments:
            ids = ledger.token_ids.tolist()
            mine = np.flatnonzero(ledger.origins == Origin.POLICY)
            assert set(ledger.versions[mine].tolist()) == {1}
            for name, tensors in (("first", first), ("base", base)):
                wanted = np.array(logprobs_with(tensors, ids[:1], ids[1:], 1.0))[mine - 1]
                gaps[name].append(float(np.abs(wanted - ledger.logprobs[mine]).max()))
    assert max(gaps["first"]) < CLOSE < max(gaps["base"])


def test_a_training_on_a_server_of_its_own_samples_from_the_weights_it_made(vllm_python: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "turnwise.commands.cli", "train", *SETTINGS, f"runs_dir={tmp_path}"]
    subprocess.run([*command, "engine=vllm_server", f"servers.python={vllm_python}"], check=True, cwd=ROOT)
    check_run(tmp_path)
    assert "serves at" in (tmp_path / "live" / "log.txt").read_text()
    assert (tmp_path / "live" / "servers" / "server_0.log").is_file()


def in_process(vllm_python: str, place: Path, *more: str) -> list[str]:
    """The command of a training with vLLM's own interpreter. Our packages come last, so that its own are taken."""
    places = [str(ROOT), sysconfig.get_path("purelib")]
    script = place / "main.py"
    script.write_text(
        f"import sys\nsys.path += {places!r}\nfrom turnwise.commands.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    return [vllm_python, str(script), "train", *SETTINGS, f"runs_dir={place}", "engine=vllm", *more]


def test_a_training_with_vllm_in_its_process_does_too(vllm_python: str, tmp_path: Path) -> None:
    subprocess.run(in_process(vllm_python, tmp_path), check=True, cwd=tmp_path)
    check_run(tmp_path)


def test_vllm_in_a_process_that_is_killed_ends_with_it(vllm_python: str, tmp_path: Path) -> None:
    log = tmp_path / "live" / "log.txt"
    with subprocess.Popen(in_process(vllm_python, tmp_path, "training.steps=500"), cwd=tmp_path) as training:
        while training.poll() is None and not (log.exists() and "step 1/" in log.read_text()):
            time.sleep(0.5)
        started = descendants(training.pid)
        assert len(started) > 1
        training.kill()
    until = time.monotonic() + 60
    while any(map(is_there, started)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(map(is_there, started))
