"""What the language model imitates: captions, and conversations with scripted looks and the habits RL is to unlearn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from folder import IMAGE
from network import TOKENS, VIEW, positions_of
from numpy.typing import NDArray
from sketches import caption
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from turnwise.ext.tinylook.canvas import Pixels, Sizes
from turnwise.ext.tinylook.language import Puzzle, answer_text, call_text
from turnwise.ext.tinylook.look import look
from turnwise.ext.tinylook.look_grid import SEEN, STEPS
from turnwise.ext.tinylook.rows import view_of
from turnwise.ext.tinylook.scenes import PRIOR_DIGIT, Knobs, Scene, scene_at
from turnwise.ext.tinylook.solvers import Glance, guess, oracle_glances, random_glance

TOOLS = [look.schema]
BUCKETS = 4
"""Batches made together and sorted by length, so that little of them is padding."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How often a trace is not what somebody who knows would do. All of it is on purpose: RL needs room."""

    missed: float = 0.75
    """Looks at the middle first, wherever the evidence is: the likeliest first look is a wrong one. With it a look is
    right less often than a guess at `prior`, which is what a reward for right answers alone has to see through."""
    again: float = 0.3
    """Of those that missed: looks again, where the evidence is; the others guess."""
    guessed: float = 0.1
    """Answers at once, with anything."""
    needless: float = 0.6
    """Looks where nothing needs it."""
    prior: float = 0.6
    """Answers a `prior` with its common digit at once."""


DILIGENT = Habits(missed=0, guessed=0, needless=0, prior=0)
"""Somebody who knows."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A demonstrated conversation: the view, the question, the looks and the answer."""

    view: Pixels
    question: str
    looks: Sequence[tuple[Glance, Pixels]]
    answer: str

    def messages(self) -> list[dict[str, object]]:
        """As a chat template takes them."""
        image = {"type": "image"}
        messages: list[dict[str, object]] = [
            {"role": "user", "content": [image, {"type": "text", "text": self.question}]}
        ]
        for glance, _ in self.looks:
            messages.append({"role": "assistant", "content": call_text(glance.box, glance.turn, glance.contrast)})
            messages.append({"role": "tool", "content": [{"type": "text", "text": SEEN}, image]})
        return [*messages, {"role": "assistant", "content": answer_text(self.answer)}]


def trace_of(scene: Scene, rng: random.Random, habits: Habits) -> Trace:
    """What the script does with a scene."""
    sizes = Sizes()
    glances, answer = oracle_glances(scene, sizes), scene.answer
    if scene.puzzle is Puzzle.NONE:
        glances = [random_glance(rng, sizes)] if rng.random() < habits.needless else []
    elif scene.puzzle is Puzzle.PRIOR and rng.random() < habits.prior:
        glances, answer = [], PRIOR_DIGIT
    elif rng.random() < habits.guessed:
        glances, answer = [], guess(scene, rng)
    elif rng.random() < habits.missed:
        first = _in_the_middle(glances[0])
        again = rng.random() < habits.again
        glances, answer = ([first, *glances], answer) if again else ([first], guess(scene, rng))
    looks = [(glance, glance.at(scene.pixels, sizes.view)) for glance in glances]
    return Trace(view_of(scene.pixels, VIEW), scene.question, looks, answer)


def _in_the_middle(right: Glance) -> Glance:
    """A look like the right one at the middle of the canvas."""
    left, upper = ((STEPS - right.box[axis + 2] + right.box[axis]) // 2 for axis in (0, 1))
    wide, high = right.box[2] - right.box[0], right.box[3] - right.box[1]
    return Glance((left, upper, left + wide, upper + high), right.turn, right.contrast)


Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class Taught:
    """A padded batch of conversations."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    """[3, B, T]."""
    learned: torch.Tensor
    """Which tokens the assistant wrote."""
    images: torch.Tensor
    """Of all conversations in order."""

    @classmethod
    def of(cls, arrays: Arrays, device: torch.device | None = None) -> "Taught":
        """The batch of arrays that `pad` makes, as tensors on a device."""
        return cls(*(torch.from_numpy(part).to(device) for part in arrays))


class DemonstrationBatches(Dataset[list[Arrays]]):
    """Buckets of batches by number, so that they are the same whoever makes them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, batch: int, habits: Habits, knobs: Knobs
    ):
        self.tokenizer, self.seed, self.batch, self.habits, self.knobs = tokenizer, seed, batch, habits, knobs
        self.count = -(-steps // BUCKETS)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[Arrays]:
        if index >= self.count:
            raise IndexError(index)
        rng = random.Random(f"lessons/{self.seed}/{index}")
        size = BUCKETS * self.batch
        scenes = (scene_at("train", self.seed, index * size + number, self.knobs) for number in range(size))
        encoded = [encode(self.tokenizer, trace_of(scene, rng, self.habits)) for scene in scenes]
        encoded.sort(key=lambda entry: len(entry[0]))
        batches = [pad(self.tokenizer, encoded[at : at + self.batch]) for at in range(0, size, self.batch)]
        rng.shuffle(batches)
        return batches


class Captions(Dataset[list[Arrays]]):
    """Captions in the same form: many places and digits by colour in one image, before one of them is looked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, batch: int) -> None:
        self.tokenizer, self.seed, self.batch, self.count = tokenizer, seed, batch, -(-steps // BUCKETS)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[Arrays]:
        if index >= self.count:
            raise IndexError(index)
        rng = random.Random(f"captions/{self.seed}/{index}")
        return [
            pad(self.tokenizer, [_captioned(self.tokenizer, rng) for _ in range(self.batch)]) for _ in range(BUCKETS)
        ]


def _captioned(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> "Encoded":
    pixels, text = caption(rng)
    question: dict[str, object] = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "colour"}]}
    ids, learned = encode_messages(tokenizer, [question, {"role": "assistant", "content": text}])
    return ids, learned, [pixels]


Encoded = tuple[NDArray[np.int64], NDArray[np.bool_], list[Pixels]]


def encode(tokenizer: PreTrainedTokenizerFast, trace: Trace) -> Encoded:
    """Token ids, which of them the assistant wrote, and the images."""
    ids, learned = encode_messages(tokenizer, trace.messages())
    return ids, learned, [trace.view, *(pixels for _, pixels in trace.looks)]


def encode_messages(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, object]]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids, and which of them the assistant wrote."""
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    ids = np.array(tokenizer(text.replace(IMAGE, IMAGE * TOKENS)).input_ids, dtype=np.int64)
    start, end, assistant = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>", "assistant")
    )
    learned = np.zeros(len(ids), dtype=np.bool_)
    for begin in np.flatnonzero((ids[:-1] == start) & (ids[1:] == assistant)):
        stop = begin + int(np.argmax(ids[begin:] == end))
        learned[begin + 3 : stop + 1] = True
    return ids, learned


def pad(tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Encoded]) -> Arrays:
    """One batch of conversations, in the order of `Taught`."""
    longest = max(len(ids) for ids, _, _ in conversations)
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    token_ids = np.zeros((len(conversations), longest), dtype=np.int64)
    learned = np.zeros((len(conversations), longest), dtype=np.bool_)
    positions = np.zeros((3, len(conversations), longest), dtype=np.int64)
    for number, (ids, mask, _) in enumerate(conversations):
        token_ids[number, : len(ids)] = ids
        learned[number, : len(ids)] = mask
        positions[:, number, : len(ids)] = positions_of(ids, image)
    images = np.stack([pixels for _, _, pictures in conversations for pixels in pictures])
    return token_ids, positions, learned, images
