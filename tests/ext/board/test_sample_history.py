"""One sample over the steps of a run: every time it was played, and nothing else."""

from turnwise.ext.board import sample_history as module
from turnwise.ext.board.sample_history import sample_history
from turnwise.ext.board.table import Table
from turnwise.storage.index import record


def test_groups_by_step_the_newest_first(run_dir, make, monkeypatch):
    for step, rewards in ((1, (0.0, 0.0)), (3, (1.0, None)), (9, (1.0, 1.0))):
        made = [make("other", step=step), *(make("s", step=step, sibling=n, reward=r) for n, r in enumerate(rewards))]
        record(run_dir, f"trajectories/step_{step:06d}.parquet", made)
    record(run_dir, "eval/step_000003.parquet", [make("s", step=3, reward=0.5, answer="last")])
    table = Table(run_dir)
    table.refresh(None)
    found = sample_history(table, "s")
    assert [(group["step"], group["split"], group["size"], group["mean"]) for group in found["groups"]] == [
        (9, "train", 2, 1.0),
        (3, "train", 2, 1.0),
        (3, "eval", 1, 0.5),
        (1, "train", 2, 0.0),
    ]
    assert (found["question"], found["data_source"], found["episodes"]) == ("What is 6 times 7?", "arithmetic", 7)
    episode = found["groups"][1]["episodes"][1]
    assert (episode["row"], episode["sibling"], episode["reward"], episode["right"]) == (2, 1, None, None)
    assert (found["groups"][0]["right"], found["groups"][1]["scored"]) == (2, 1)
    assert sample_history(table, "nobody")["groups"] == [] and sample_history(table, "nobody")["question"] is None
    monkeypatch.setattr(module, "MOST_EPISODES", 3)
    assert [group["size"] for group in sample_history(table, "s")["groups"]] == [2, 1], "the newest"
    assert sample_history(table, "s")["episodes"] == 7
