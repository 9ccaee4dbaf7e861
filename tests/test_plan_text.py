"""The plan warns before a run that is known to go wrong."""

import pytest

from turnwise import configure
from turnwise.assemble import prepare
from turnwise.plan_text import plan_text

LEARNER = "algorithm.old_logprobs=learner"


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ((LEARNER, "training.max_lag=1"), True),
        ((LEARNER, "training.max_lag=1", "algorithm.correction=token"), False),
        ((LEARNER, "training.max_lag=0"), False),
        (("training.max_lag=1",), False),
    ],
)
def test_stale_episodes_without_a_bound_are_told(overrides, warned):
    config = configure("rollout.tools=[calculate]", *overrides)
    text = plan_text(prepare(config, "train", limit=2))
    assert ("can collapse; set algorithm.correction=token" in text) is warned
