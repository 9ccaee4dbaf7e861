"""How the tiny vision-language model was made: tokenizer, fresh weights, seeing, captions, then scripted looks.

Run `python -m turnwise.models.tiny_vision.recipe --out DIR`: minutes on a GPU with many cores beside it, which draw.
First the tower names what stands in every patch of sketches. It rests from then on, while the language model writes
captions (where is which colour, with which digit), then imitates scripted conversations of the task `tinylook`. In the
end the script misses, guesses and looks needlessly on purpose (`Habits`): what is left to learn is for RL. All of it
follows from `--seed`; a GPU is used where there is one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3VLForConditionalGeneration

from turnwise.models.tiny_vision.demonstrations import DILIGENT, Captions, Demonstrations, Habits
from turnwise.models.tiny_vision.folder import write_folder
from turnwise.models.tiny_vision.imitation import imitate
from turnwise.models.tiny_vision.network import fresh_model
from turnwise.models.tiny_vision.pretraining import pretrain_tower
from turnwise.tasks.tinylook.rows import read_knobs

PUZZLES = "read,prior,none,rotate,contrast,compare=2,search=2,count=2,compute=3"
"""What is learned slowly is shown more often."""


def main(given: Sequence[str] | None = None) -> None:
    """Command line of the recipe."""
    args = _arguments(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = write_folder(args.out)
    model = fresh_model(len(tokenizer), tokenizer.get_vocab(), args.seed).to(device)
    pretrain_tower(
        model, seed=args.seed, steps=args.seeing_steps, batch=args.seeing_batch, lr=2e-3, workers=args.workers, say=_say
    )
    knobs, batch = read_knobs(args.puzzles), args.batch
    stages = (
        ("captions", Captions(tokenizer, args.seed, max(1, args.steps // 3), batch), 2e-3),
        ("looks", Demonstrations(tokenizer, 2 * args.seed, args.steps, batch, DILIGENT, knobs), 1e-3),
        ("habits", Demonstrations(tokenizer, 2 * args.seed + 1, max(1, args.steps // 8), batch, Habits(), knobs), 5e-4),
    )
    for name, shown, lr in stages:
        imitate(model, shown, name=name, lr=lr, workers=args.workers, say=_say)
    save(model, args.out)


def save(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Config and weights, these in half of the bytes they were learned in."""
    model.to("cpu", torch.float16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeing-steps", type=int, default=3600)
    parser.add_argument("--seeing-batch", type=int, default=512, help="images, in eights")
    parser.add_argument(
        "--steps", type=int, default=4800, help="of looks, in fours; a third of it for captions, an eighth for habits"
    )
    parser.add_argument("--batch", type=int, default=256, help="conversations")
    parser.add_argument("--puzzles", default=PUZZLES, help=f"kinds of question with weights (default {PUZZLES})")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw (0: the one that learns)")
    return parser.parse_args(given)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
