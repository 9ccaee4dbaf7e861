"""Probes of what an agent does with its tools' images: they are blanked, swapped or noised before the model sees them.

An agent that answers by what it looked at falls to chance; one that guesses does not. Tools and records are left alone:
only the picture in the reply is another.
"""

import asyncio
import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import ConfigError, EpisodeError
from turnwise.errors.nearest_name import unknown
from turnwise.rollout.sample_images import opened, png_url
from turnwise.rollout.toolbox.images import ShowImages
from turnwise.types import Image, Role, Sample, Trajectory

NOISE = 200.0
"""Standard deviation of the noise that is added to each channel, of 255 levels, at each grain of GRAINS pixels: fine
noise alone is averaged out in what was enlarged."""
GRAINS = (1, 2, 4, 8)


class Probe(enum.StrEnum):
    """What a probe puts in the place of a tool's image."""

    BLANK = "blank"
    """One even grey, its own mean."""
    SWAP = "swap"
    """What tools showed for another sample, of the same data source where that has one."""
    NOISE = "noise"
    """Its pixels with so much noise that nothing small can be read in them."""


@dataclass(frozen=True, slots=True)
class Donors:
    """Images that tools showed in episodes played before, by data source and sample."""

    images: Mapping[str, Mapping[str, Sequence[Image]]]
    truths: Mapping[str, str]
    """The ground truth of each sample, to find one with another."""

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> "Donors":
        """Those in the tools' replies of these episodes."""
        by_source: dict[str, dict[str, list[Image]]] = {}
        truths: dict[str, str] = {}
        for trajectory in trajectories:
            images = list(tool_reply_images(trajectory))
            truths[trajectory.sample.id] = repr(trajectory.sample.ground_truth)
            if images:
                by_source.setdefault(trajectory.sample.data_source, {}).setdefault(trajectory.sample.id, images)
        return cls(by_source, truths)

    def image_for(self, sample: Sample, number: int) -> Image:
        """That of another sample, of its data source and with another answer if there is one; the same each time."""
        own = self.images.get(sample.data_source, {})
        every = {name: images for by_sample in self.images.values() for name, images in by_sample.items()}
        for by_sample in (own, every):
            others = sorted(name for name in by_sample if name != sample.id)
            chosen = [name for name in others if self.truths[name] != repr(sample.ground_truth)] or others
            if chosen:
                images = by_sample[chosen[_seed(sample, number) % len(chosen)]]
                return images[number % len(images)]
        raise EpisodeError("no other sample was shown an image of a tool to swap with")


def tool_reply_images(trajectory: Trajectory) -> Iterable[Image]:
    """The images in the tools' replies of an episode, in order."""
    for turn in trajectory.every_turn:
        for reply in turn.replies:
            if reply.role is Role.TOOL and not isinstance(reply.content, str):
                yield from (part for part in reply.content if isinstance(part, Image))


def probed(probe: Probe, donors: Donors) -> ShowImages:
    """What a toolbox shows under this probe."""

    async def show(sample: Sample, before: int, images: tuple[Image, ...]) -> tuple[Image, ...]:
        numbered = list(enumerate(images, start=before))
        if probe is Probe.SWAP:
            return tuple(donors.image_for(sample, number) for number, _ in numbered)
        return await asyncio.to_thread(
            lambda: tuple(_changed(image, probe, _seed(sample, number)) for number, image in numbered)
        )

    return show


def _changed(image: Image, probe: Probe, seed: int) -> Image:
    import PIL.Image

    pixels = np.asarray(opened(image, "an image of a tool"), dtype=np.float32)
    if probe is Probe.BLANK:
        altered = np.full_like(pixels, pixels.mean())
    else:
        altered = pixels + sum(_noise(np.random.default_rng((seed, grain)), pixels.shape, grain) for grain in GRAINS)
    return Image(png_url(PIL.Image.fromarray(altered.clip(0, 255).astype(np.uint8))))


def _noise(rng: np.random.Generator, shape: tuple[int, ...], grain: int) -> NDArray[np.float64]:
    height, width, channels = shape
    coarse = rng.normal(0.0, NOISE, (-(-height // grain), -(-width // grain), channels))
    return coarse.repeat(grain, 0).repeat(grain, 1)[:height, :width]


def _seed(sample: Sample, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{sample.id}/{number}".encode(), digest_size=6).digest())


def read_probes(names: str) -> list[Probe]:
    """Probes as a command line names them: `blank,swap`; ConfigError for one that there is not."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in list(Probe):
            raise ConfigError(unknown("probe", name, [probe.value for probe in Probe]))
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError(f"probes are named once each, at least one: {', '.join(Probe)}")
    return [Probe(name) for name in chosen]
