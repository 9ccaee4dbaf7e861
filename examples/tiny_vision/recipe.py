"""How the tiny vision-language model was made: tokenizer, fresh weights, seeing, captions, then scripted looks.

Run `python examples/tiny_vision/recipe.py --out DIR`: minutes on a GPU with many cores beside it, which draw.
First the tower names what stands in every patch of sketches. It rests from then on, while the language model writes
captions (where is which colour, with which digit), then imitates scripted conversations of the task `tinylook`. In the
end the script misses, guesses and looks needlessly on purpose (`Habits`): what is left to learn is for RL. All of it
follows from `--seed`; a GPU is used where there is one.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from demonstrations import (
    BUCKETS,
    DILIGENT,
    Arrays,
    Captions,
    DemonstrationBatches,
    Habits,
    Taught,
)
from folder import write_folder
from network import fresh_model, run_text
from pretraining import in_order, pretrain_tower
from transformers import Qwen3VLForConditionalGeneration

from turnwise.ext.tinylook.rows import read_knobs

PUZZLES = "read,prior,none,rotate,contrast,compare=2,search=2,count=2,compute=3"
"""What is learned slowly is shown more often."""


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the tinylook model by the recipe, from the arguments of the command line."""
    args = _arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = write_folder(args.out)
    model = fresh_model(len(tokenizer), tokenizer.get_vocab(), args.seed).to(device)
    pretrain_tower(
        model, seed=args.seed, steps=args.seeing_steps, batch=args.seeing_batch, lr=2e-3, workers=args.workers, say=_say
    )
    knobs, batch = read_knobs(args.puzzles), args.batch
    stages = (
        ("captions", Captions(tokenizer, args.seed, max(1, args.steps // 3), batch), 2e-3),
        ("looks", DemonstrationBatches(tokenizer, 2 * args.seed, args.steps, batch, DILIGENT, knobs), 1e-3),
        (
            "habits",
            DemonstrationBatches(tokenizer, 2 * args.seed + 1, max(1, args.steps // 8), batch, Habits(), knobs),
            5e-4,
        ),
    )
    for name, demonstrations, lr in stages:
        imitate(model, demonstrations, name=name, lr=lr, workers=args.workers, say=_say)
    save(model, args.out)


def save(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Config and weights, these in half of the bytes they were learned in."""
    model.to("cpu", torch.float16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
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
    return parser.parse_args(argv)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()


def imitate(
    model: Qwen3VLForConditionalGeneration,
    demonstrations: DemonstrationBatches | Captions,
    *,
    name: str,
    lr: float,
    workers: int,
    say: Callable[[str], None],
) -> float:
    """Train the language model on the tokens of the assistant, with the tower as it is.

    Gives the share of them that it would have written too, at the last step.
    """
    device = next(model.parameters()).device
    learned = list(model.model.language_model.parameters())
    optimizer = torch.optim.AdamW(learned, lr, betas=(0.9, 0.98), weight_decay=0.01)
    steps = len(demonstrations) * BUCKETS
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    began, right = time.monotonic(), 0.0
    for step, arrays in enumerate(_batches(demonstrations, workers)):
        logits, wanted = _written(model, Taught.of(arrays, device))
        loss = F.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            right = float((logits.argmax(-1) == wanted).float().mean())
            took = time.monotonic() - began
            say(f"{name}: step {step} of {steps}, {took:.0f} s, loss {loss.item():.4f}, tokens right {right:.1%}")
    return right


def _batches(demonstrations: DemonstrationBatches | Captions, workers: int) -> Iterator[Arrays]:
    for bucket in in_order(demonstrations, workers):
        yield from bucket


def _written(model: Qwen3VLForConditionalGeneration, batch: Taught) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits for every token that the assistant wrote, and these."""
    hidden = run_text(model, batch.token_ids, batch.images, batch.positions)
    learned = batch.learned[:, 1:]
    return model.lm_head(hidden[:, :-1][learned]), batch.token_ids[:, 1:][learned]
