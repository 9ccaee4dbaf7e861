"""Training through an SDK agent: what is learnt from is what the policy wrote, token by token."""

import contextlib
from pathlib import Path

import numpy as np

from turnwise import configure, train
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import Role, StopReason

EXAMPLE = Path(__file__).parents[3] / "examples" / "openai_agent" / "agent.py"


def test_the_example_is_trained_on_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    config = configure(
        "run=a", f"runs_dir={tmp_path}", f"sdk_agents.client={EXAMPLE}:agent", "engine.threads=1", "training.steps=2",
        "training.groups=2", "training.group_size=4", "training.max_lag=0", "training.minibatches=1",
        "training.eval_every=0", "training.save_every=0", "tracking.to=[]", "eval.samples=2", "rollout.tools=[]",
    )  # fmt: skip
    with contextlib.chdir(tmp_path):
        train(config)
    files = sorted((tmp_path / "a" / "trajectories").glob("step_*.parquet"))
    found = [one for path in files for one in read_trajectories(path)]
    assert len(found) == 2 * 8 and all(one.failure is None for one in found)
    assert any(Role.TOOL in [message.role for message in one.messages] for one in found)
    assert {one.stop_reason for one in found} <= {StopReason.ANSWERED, StopReason.TURN_TRUNCATED}
    trained = 0
    for one in found:
        (ledger,) = one.segments
        covered = np.zeros(len(ledger), dtype=bool)
        for turn in one.turns:
            covered[turn.start : turn.start + turn.completion_tokens] = True
        assert (ledger.loss_mask == covered).all()
        if ledger.training is not None and ledger.training.logprobs is not None:
            # The learner reads the same tokens after the same tokens, or it would not agree with the sampler.
            np.testing.assert_allclose(ledger.training.logprobs[covered], ledger.logprobs[covered], atol=2e-3)
            trained += covered.sum()
    assert trained > 0
