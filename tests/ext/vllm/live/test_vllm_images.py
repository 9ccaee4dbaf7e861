"""A real vLLM that is shown images: a tiny Qwen2.5-VL writes a turn, is shown a tool's image and writes another, and its
log-probs are our learner's, before and after an update that changes the vision tower too."""

import asyncio
import json
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vision_processors
from batches import batch_of
from seeing import KINDS, MROPE
from seeing import build as build_model

from turnwise.config import Config
from turnwise.data.task_config import configure
from turnwise.engines.learners.learner import SUPERVISED, Who
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.open_in_process import open_learner
from turnwise.engines.opener import LearnerParts, OpenLearner
from turnwise.engines.publish_weights import make_update
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import EpisodeError
from turnwise.ledger import MediaSpan

ROOT = Path(__file__).parents[4]
CLOSE = 2e-4
"""Of log-probs: two programs that add in another order."""


@pytest.fixture(scope="module")
def seeing_python(vllm_python: str) -> str:
    """vLLM imports torchvision for every model that sees."""
    if subprocess.run([vllm_python, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        pytest.skip("the interpreter with vLLM has no torchvision, which vLLM imports for models that see")
    return vllm_python


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = vision_processors.build("qwen2_5_vl", tmp_path_factory.mktemp("sees"))
    ids, kind = vision_processors.ids("qwen2_5_vl"), KINDS["qwen2_5_vl"]
    wide = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    text = {"vocab_size": vision_processors.VOCABULARY, "max_position_embeddings": 2048}
    rope = {"rope_parameters": MROPE | {"mrope_section": [6, 5, 5]}}
    build_model(
        "qwen2_5_vl",
        text_config=kind["text_config"] | text | wide | rope,
        vision_config=kind["vision_config"] | {"hidden_size": 32, "out_hidden_size": 64},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    ).save_pretrained(made)
    return made


def config_of(folder: Path, *more: str) -> Config:
    return configure(
        f"model.path={folder}", "learner.device=cpu", "learner.lr=0.01", "learner.train_vision=true", *more
    )


async def conversation(sampler: Sampler, config: Config, name: str) -> list[dict[str, Any]]:
    """Two turns: a user's image, then a tool's of another size; the second sequence begins with the first."""
    renderer, turns = make_renderer(config), list[dict[str, Any]]()
    assert renderer.images is not None
    ids, spans = list[int](), list[MediaSpan]()
    for number, size in enumerate(((40, 32), (90, 70))):  # the second one is made smaller by the processor
        picture = vision_processors.encoded(vision_processors.picture(*size, seed=number))
        media = renderer.images.prepare(picture)
        spans.append(MediaSpan(media, len(ids) + 3))
        ids += [65, 66, 67, *media.token_ids.tolist(), 68, 69]
        noise = NoiseKey(3, 0, name, number)
        found = await sampler.generate(Request(name, np.array(ids), SamplingParams(24), noise, tuple(spans)))
        ids += found.token_ids.tolist()
        turns.append({"ids": list(ids), "count": len(found.token_ids), "logprobs": found.logprobs.tolist()})
    return turns


def gap(turns: list[dict[str, Any]], learner: OpenLearner, config: Config) -> float:
    """How far the last turn's log-probs are from the learner's; all images of the conversation are in its tokens."""
    renderer = make_renderer(config)
    assert renderer.images is not None
    worst = 0.0
    for number, turn in enumerate(turns):
        ids, spans = np.array(turn["ids"]), list[MediaSpan]()
        for shown, size in enumerate(((40, 32), (90, 70))[: number + 1]):
            picture = vision_processors.encoded(vision_processors.picture(*size, seed=shown))
            begin = 3 if not shown else len(turns[0]["ids"]) + 3
            spans.append(MediaSpan(renderer.images.prepare(picture), begin))
        mine = torch.arange(len(ids) - turn["count"], len(ids))
        batch = replace(batch_of(torch.from_numpy(ids), [len(ids)], mine), media=tuple(spans))
        worst = max(worst, float(np.abs(learner.score(batch, Who.POLICY) - np.array(turn["logprobs"])).max()))
        turn["batch"] = batch
    return worst


def test_a_server_is_shown_images_and_its_log_probs_are_the_learners(
    seeing_python: str, folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder, "engine=vllm_server", f"servers.python={seeing_python}")
    renderer, said = make_renderer(config), list[str]()
    learner = open_learner(config, renderer, LearnerParts(updates=2))

    async def main() -> None:
        sampler = (await open_sampler(config, renderer, said.append)).sampler
        try:
            assert sampler.capabilities.media
            turns = await conversation(sampler, config, "first")
            assert gap(turns, learner, config) < CLOSE
            advantages = {"advantages": np.ones(turns[1]["count"])}
            batch = replace(turns[1]["batch"], **{k: v.astype(np.float32) for k, v in advantages.items()})
            learner.update([batch], SUPERVISED)
            await sampler.publish(make_update(learner, sampler.capabilities, tmp_path / "weights"), 1)
            later = await conversation(sampler, config, "later")
            assert gap(turns, learner, config) > 10 * CLOSE > 10 * gap(later, learner, config)
            assert renderer.images is not None
            marker, media = renderer.images.image_token_id, later[1]["batch"].media[0].media
            for ids, place in (([65, marker], 2), ([65, 66], 2)):
                asked = np.array([*ids, *media.token_ids, 68, marker, 69])
                spans, noise = (MediaSpan(media, place),), NoiseKey(3, 0, "s", 0)
                request = Request("strays", asked, SamplingParams(4), noise, spans)
                if marker in ids:
                    with pytest.raises(EpisodeError, match="take it for the image's place"):
                        await sampler.generate(request)
                else:
                    assert len((await sampler.generate(request)).token_ids) == 4
        finally:
            await sampler.close()

    asyncio.run(main())
    assert any("reads text and images" in line for line in said)


SCRIPT = """
import asyncio, json, sys
sys.path += {places!r}
sys.path.insert(0, {here!r})
from pathlib import Path
from test_vllm_images import config_of, conversation
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.rendering import make_renderer


async def main():
    config = config_of(Path({folder!r}), "engine=vllm")
    sampler = (await open_sampler(config, make_renderer(config), print)).sampler
    assert sampler.capabilities.media
    Path({out!r}).write_text(json.dumps(await conversation(sampler, config, "first")))
    await sampler.close()


if __name__ == "__main__":
    asyncio.run(main())
"""


def test_vllm_in_a_process_of_ours_is_shown_them_too(seeing_python: str, folder: Path, tmp_path: Path) -> None:
    here, out = Path(__file__).parent, tmp_path / "turns.json"
    places = [str(ROOT), str(here.parent), str(here.parents[1]), sysconfig.get_path("purelib")]
    script = tmp_path / "main.py"
    script.write_text(SCRIPT.format(places=places, here=str(here), folder=str(folder), out=str(out)))
    subprocess.run([seeing_python, str(script)], check=True, cwd=tmp_path)
    config = config_of(folder)
    learner = open_learner(config, make_renderer(config), LearnerParts(updates=1))
    assert gap(json.loads(out.read_text()), learner, config) < CLOSE
