"""How well `tinylook` can be answered from the small view alone, beside chance, a look anywhere and a scripted oracle.

    python benchmarks/tinylook_ceilings.py [--train 12000] [--test 2000] [--puzzles read,count]

The no-tool figure is that of a classifier of its own for every kind of question, taught on the view around the place
where the evidence lies, with that place, the words of the question and the turn of the canvas given to it: more than a
policy has.
Prints the table of docs/results/tinylook/ceilings.md.
"""

import argparse
import random

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.ext.tinylook.canvas import Sizes
from turnwise.ext.tinylook.language import COLOURS, ROWS, SUMS, Puzzle
from turnwise.ext.tinylook.rows import read_knobs, view_of
from turnwise.ext.tinylook.scenes import Scene, draw
from turnwise.ext.tinylook.solvers import answer_from, guess, oracle_glances, random_glance

PATCH = 14
"""Pixels of the view around a region: more than a mark with its digit, or a plate, takes there."""
EPOCHS, HIDDEN, BATCH = 40, 384, 256
Array = NDArray[np.float32]


def features(scene: Scene, sizes: Sizes) -> Array:
    """The view around each region, where that lies between its pixels, and what else is known without a look."""
    view = view_of(scene.pixels, sizes.view).astype(np.float32) / 255
    words = scene.question.split()
    known = [float(word in words) for word in (*COLOURS, *ROWS, *SUMS)] + [
        float(scene.turned == t) for t in (90, 180, 270)
    ]
    if not scene.regions:
        return np.concatenate([view.reshape(16, 4, 16, 4, 3).mean((1, 3)).ravel(), known], dtype=np.float32)
    parts: list[Array] = []
    padded = np.pad(view, ((PATCH, PATCH), (PATCH, PATCH), (0, 0)), mode="edge")
    scale = sizes.canvas / sizes.view
    for region, target in zip(scene.regions, scene.targets, strict=False):
        middle = [(region[axis] + region[axis + 2]) / 2 / scale for axis in (0, 1)]
        left, upper = (round(place - PATCH / 2) + PATCH for place in middle)
        parts.append(padded[upper : upper + PATCH, left : left + PATCH].ravel())
        parts.append(np.array([(edge / scale) % 1 for edge in target], dtype=np.float32))
        parts.append(
            np.array([target[0] / scale - left + PATCH, target[1] / scale - upper + PATCH], np.float32) / PATCH
        )
    return np.concatenate([*parts, known], dtype=np.float32)


def scenes(puzzle: Puzzle, split: str, count: int, sizes: Sizes) -> list[Scene]:
    """Scenes of one kind, none of them those of another split."""
    return [draw(puzzle, split, random.Random(f"ceiling/{puzzle}/{split}/{n}"), sizes) for n in range(count)]


def classifier_accuracy(train: list[Scene], test: list[Scene], sizes: Sizes) -> float:
    """Of a classifier with two hidden layers; the epoch is chosen on a tenth of the training scenes."""
    torch.manual_seed(0)
    answers = sorted({scene.answer for scene in (*train, *test)})  # one that no training scene has is always wrong
    x, y = (torch.tensor(np.stack([features(one, sizes) for one in part])) for part in (train, test))
    labels, wanted = (torch.tensor([answers.index(one.answer) for one in part]) for part in (train, test))
    mean, deviation = x.mean(0), x.std(0) + 1e-3
    x, y = (x - mean) / deviation, (y - mean) / deviation
    held = len(x) // 10
    layers = (torch.nn.Linear(x.shape[1], HIDDEN), torch.nn.ReLU(), torch.nn.Dropout(0.2))
    layers += (torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, len(answers)))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.02)
    best, found = -1.0, 0.0
    for _ in range(EPOCHS):
        model.train()
        for rows in torch.randperm(len(x) - held).split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(x[held:][rows]), labels[held:][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            score = float((model(x[:held]).argmax(1) == labels[:held]).float().mean())
            if score > best:
                best, found = score, float((model(y).argmax(1) == wanted).float().mean())
    return found


def looking_accuracy(test: list[Scene], sizes: Sizes, *, knows: bool) -> tuple[float, float]:
    """(right, looks) of the oracle or of one look anywhere; what cannot be read is guessed."""
    right, looks = 0, 0
    for number, scene in enumerate(test):
        rng = random.Random(number)
        glances = oracle_glances(scene, sizes) if knows else [random_glance(rng, sizes)]
        shown = [glance.at(scene.pixels, sizes.view) for glance in glances]
        answer = answer_from(scene, view_of(scene.pixels, sizes.view), glances, shown, sizes) or guess(scene, rng)
        right, looks = right + (answer == scene.answer), looks + len(glances)
    return right / len(test), looks / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", type=int, default=12000)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--puzzles", default="")
    args = parser.parse_args()
    sizes = Sizes()
    print("| task | chance | no tool | one look anywhere | oracle | its looks |\n|---|---|---|---|---|---|")
    for puzzle in read_knobs(args.puzzles).weights:
        train, test = scenes(puzzle, "train", args.train, sizes), scenes(puzzle, "test", args.test, sizes)
        chance = sum(guess(one, random.Random(f"guess/{n}")) == one.answer for n, one in enumerate(test)) / len(test)
        seen, (anywhere, _) = classifier_accuracy(train, test, sizes), looking_accuracy(test, sizes, knows=False)
        oracle, looks = looking_accuracy(test, sizes, knows=True)
        print(f"| {puzzle} | {chance:.3f} | {seen:.3f} | {anywhere:.3f} | {oracle:.3f} | {looks:.2f} |", flush=True)


if __name__ == "__main__":
    main()
