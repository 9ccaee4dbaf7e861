"""Images a second to features, beside plain transformers: its processor and its tower, one image at a time.

Ours prepares the images and encodes them: with one call of the tower for each, and with one for many (as on a GPU).
The whole rollout has conversations that each open with an image of their own and write a short turn; reading the words
and writing the tokens is in its time.

    python benchmarks/images.py [--model FOLDER] [--device cpu] [--conversations 64] [--side 64] [--tokens 4]
"""

import argparse
import asyncio
import io
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

import turnwise as tw
from turnwise.chat.renderer import Renderer
from turnwise.config.choices import Precision
from turnwise.engines.model.vision_model import VisionModel
from turnwise.engines.open_configured import open_sampler
from turnwise.engines.opener import read_policy
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.in_process import InProcessSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.ext.tinylook import model as bundled
from turnwise.types import Image, Message, Role, Text

Way = Callable[[Sequence[bytes]], Awaitable[int]]
"""way(files): images to features, however that is done; how often the tower was asked."""


def pictures(count: int, side: int, seed: int) -> list[bytes]:
    """Coloured noise as PNG files."""
    noise, files = np.random.default_rng(seed), []
    for _ in range(count):
        file = io.BytesIO()
        PIL.Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    return files


class Transformers:
    """The peer."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model, self._device = model.to(device).eval(), device

    async def encode(self, files: Sequence[bytes]) -> int:
        """A `Way`."""
        with torch.inference_mode():
            for content in files:
                picture = PIL.Image.open(io.BytesIO(content)).convert("RGB")
                arrays = self._processor(images=[picture], return_tensors="pt").to(self._device)
                rows = self._model.base_model.get_image_features(**arrays).pooler_output
        float(rows[0].sum())  # the device has come to the end
        return len(files)


class Encoded:
    """Ours without a sampler, with the tower asked for one image or for many."""

    def __init__(self, renderer: Renderer, model: VisionModel, *, together: bool) -> None:
        assert renderer.images is not None
        model.together = together
        self._prepare, self._model = renderer.images.prepare, model

    async def encode(self, files: Sequence[bytes]) -> int:
        """A `Way`."""
        before = self._model.tower_calls
        media = await asyncio.gather(*(asyncio.to_thread(self._prepare, content) for content in files))
        rows = self._model.encode_images(media)[-1].rows
        float(rows[0].sum())  # the device has come to the end
        return self._model.tower_calls - before


class Rollout:
    """Ours with a sampler, which asks the tower as its device does best."""

    def __init__(self, renderer: Renderer, sampler: InProcessSampler, tokens: int) -> None:
        self._renderer, self._sampler, self._params = renderer, sampler, SamplingParams(max_tokens=tokens)
        self._model = sampler._batcher._model

    async def encode(self, files: Sequence[bytes]) -> int:
        """A `Way`."""
        before = self._model.tower_calls
        await asyncio.gather(*(self._talk(str(number), content) for number, content in enumerate(files)))
        return self._model.tower_calls - before

    async def _talk(self, name: str, content: bytes) -> None:
        assert self._renderer.images is not None
        image = Image(f"data:,{name}")
        message = Message(Role.USER, (image, Text("What is it?")))
        media = {image: await asyncio.to_thread(self._renderer.images.prepare, content)}
        prompt = self._renderer.prompt([message], (), media)
        request = Request(name, np.array(prompt.ids), self._params, NoiseKey(0, 0, name, 0), prompt.media)
        await self._sampler.generate(request)
        await self._sampler.release(name)


async def work(arguments: argparse.Namespace) -> None:
    folder, device = arguments.model or Path(bundled.__file__).parent, arguments.device
    config = tw.configure(
        f"model.path={folder}", f"engine={'torch' if device == 'cpu' else 'cuda'}", f"learner.device={device}"
    )
    renderer = make_renderer(config)
    ways: dict[str, Way] = {"transformers, one at a time": Transformers(folder, torch.device(device)).encode}
    for name, together in (("features, one image a call", False), ("features, many a call", True)):
        model = read_policy(config, Precision.float32).move(torch.device(device), torch.float32)
        assert isinstance(model, VisionModel)
        ways[name] = Encoded(renderer, model, together=together).encode
    opened = await open_sampler(config, renderer, lambda text: None)
    assert isinstance(opened.sampler, InProcessSampler)
    ways["whole rollout"] = Rollout(renderer, opened.sampler, arguments.tokens).encode
    taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):  # the first warms up
        files = pictures(arguments.conversations, arguments.side, number)
        for name, way in ways.items():
            clock, cpu = time.perf_counter(), time.process_time()
            calls = await way(files)
            taken[name].append((time.perf_counter() - clock, time.process_time() - cpu, calls))
    await opened.sampler.close()
    print(f"{arguments.conversations} conversations, images of {arguments.side} x {arguments.side}, {device}")
    print(f"{'':<30}{'images/s':>10}{'ratio':>8}{'ms of CPU an image':>20}{'tower calls':>13}")
    first = None
    for name, rounds in taken.items():
        seconds, cpu, calls = (float(np.median(column)) for column in zip(*rounds[1:], strict=True))
        rate = arguments.conversations / seconds
        first = first or rate
        print(
            f"{name:<30}{rate:>10,.0f}{rate / first:>8.2f}{1000 * cpu / arguments.conversations:>20.2f}{calls:>13.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder (default: the bundled tiny_vision)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--side", type=int, default=64, help="pixels of an image")
    parser.add_argument("--tokens", type=int, default=4, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    torch.set_num_threads(1)
    asyncio.run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
