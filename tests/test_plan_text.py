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


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (("algorithm.loss=gspo",), "gspo is defined with sequence_mean_token_mean"),
        (("algorithm.loss=gspo", "algorithm.aggregation=sequence_sum_norm"), "gspo is defined with"),
        (("algorithm.loss=gspo", "algorithm.aggregation=sequence_mean_token_mean"), None),
        ((LEARNER, "algorithm.correction=geometric"), "set algorithm.correction_mode=reject"),
        ((LEARNER, "algorithm.correction=geometric", "algorithm.correction_mode=reject"), None),
        ((LEARNER, "algorithm.correction=token"), None),
        ((), None),
    ],
)
def test_choices_that_do_not_go_together_are_told(overrides, warning):
    text = plan_text(prepare(configure("rollout.tools=[calculate]", *overrides), "train", limit=2))
    assert ("warning" in text) is (warning is not None)
    assert warning is None or warning in text


def test_an_endpoint_leaves_no_tokens():
    config = configure("engine=openai", "engine.base_url=http://127.0.0.1:9/v1", "rollout.tools=[calculate]")
    text = plan_text(prepare(config, "test", limit=2))
    assert "model (asked from the endpoint); messages only: no tokens and no log-probs are recorded" in text
