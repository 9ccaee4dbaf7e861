"""A run of a model that sees, from end to end: what its folder holds, and that everybody can read it back."""

import json
from pathlib import Path

import pytest
import torch
import vision_processors as made
from tiny_vision_recipe import fresh_model, write_folder

import turnwise
from turnwise.commands.cli import main
from turnwise.engines.rendering import make_renderer
from turnwise.errors import DataError
from turnwise.ext.board.table import Table
from turnwise.ext.board.tokens import tokens
from turnwise.sft import fine_tune
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_trajectories


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sees")
    tokenizer = write_folder(folder)
    with torch.random.fork_rng():
        fresh_model(len(tokenizer), tokenizer.get_vocab(), seed=0).save_pretrained(folder)
    return folder


def rows(folder: Path, images: int = 1, number: int = 4) -> Path:
    file = folder / f"rows_{images}.jsonl"
    with file.open("w") as out:
        for row in range(number):
            names = []
            for at in range(images):
                name = f"{images}_{row}_{at}.png"
                (folder / name).write_bytes(made.encoded(made.picture(40 + row, 30, seed=row)))
                names.append(str(folder / name))
            prompt = [{"role": "user", "content": "<image>" * images + "read it"}]
            entry = {"data_source": "arithmetic", "prompt": prompt, "images": names}
            out.write(json.dumps({**entry, "reward_model": {"ground_truth": "1"}}) + "\n")
    return file


def config(folder: Path, place: Path, *more: str) -> turnwise.Config:
    file = rows(place)
    return turnwise.configure(
        f"model.path={folder}", "engine=torch", "engine.threads=1", "learner.device=cpu", "task=arithmetic",
        f"data.train_files=[{file}]", f"data.eval_files=[{file}]", f"runs_dir={place / 'runs'}", "rollout.tools=[]",
        "sampling.max_tokens=6", "eval.samples=2", "training.groups=2", "training.group_size=2", "training.steps=2",
        "training.replay_groups=1", "board.live=false", *more,
    )  # fmt: skip


def test_a_training_with_images_is_recorded_and_read_back(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = turnwise.train(config(folder, tmp_path, "run=a"))
    run = RunDir(report.run)
    files = sorted(run.path.glob("trajectories/*.parquet"))
    read = [trajectory for file in files for trajectory in read_trajectories(file)]
    assert read and all(len(trajectory.segments[0].media) == 1 for trajectory in read)
    for trajectory in read:
        assert trajectory.failure is None
        assert (run.path / f"images/{trajectory.segments[0].media[0].media.digest}.png").is_file()
        assert trajectory.render_check is None or trajectory.render_check.problem is None
    table = Table(run)
    table.refresh(None)
    shown = tokens(run, table, files[0].relative_to(run.path).with_suffix("").as_posix(), 0)
    pieces = [piece for piece in shown["segments"][0]["pieces"] if piece.startswith("[image")]
    span = read[0].segments[0].media[0]
    assert pieces == [f"[image, {span.end - span.start} tokens]"]
    again = fine_tune(
        config(
            folder,
            tmp_path,
            "run=b",
            f"sft.recorded=[{run.path}]",
            "sft.steps=1",
            f"data.eval_files=[{rows(tmp_path, 2)}]",
        )
    )
    assert again.steps == 1
    kept = [name.stem for name in (again.run / "images").iterdir() if name.suffix == ".png"]
    assert {trajectory.segments[0].media[0].media.digest for trajectory in read} <= set(kept), "copied into the run"
    for command in (["show"], ["replay", "--sample", "0", "--file", "trajectories/step_000001"], ["rescore"]):
        assert main([command[0], str(run.path), *command[1:]]) == 0, command
    assert "[image" in capsys.readouterr().out
    policy = make_renderer(turnwise.configure(f"model.path={again.policy}", "engine=torch"))
    assert policy.images is not None and policy.image_roles


@pytest.mark.long
def test_one_turn_at_a_time_a_resumed_run_is_the_same_to_the_last_bit(folder: Path, tmp_path: Path) -> None:
    alone = ("rollout.concurrency=1", "engine.max_batch=1", "training.replay_groups=0", "training.group_size=3")
    whole = turnwise.train(config(folder, tmp_path, "run=whole", "training.steps=4", *alone))
    turnwise.train(config(folder, tmp_path, "run=parts", *alone))
    parts = turnwise.train(config(folder, tmp_path, "run=parts", "training.steps=4", "resume=auto", *alone))
    weights = [(one.run / "checkpoints/step_000004/policy/model.safetensors").read_bytes() for one in (whole, parts)]
    assert weights[0] == weights[1]


def test_too_many_images_and_broken_files_are_told_before_the_run(folder: Path, tmp_path: Path) -> None:
    several = rows(tmp_path, 3)
    with pytest.raises(DataError, match=r"has 3 images, and rollout.max_images=2"):
        turnwise.evaluate(config(folder, tmp_path, f"data.eval_files=[{several}]", "rollout.max_images=2"))
    given = config(folder, tmp_path)
    (tmp_path / "1_1_0.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DataError, match="the image cannot be read"):
        turnwise.evaluate(given)
    assert not (tmp_path / "runs").exists()
