"""The plan warns before a run that is known to go wrong."""

import pytest

from turnwise import configure
from turnwise.errors import ConfigError
from turnwise.reports.plan import plan_text
from turnwise.rollout.prepare import prepare
from turnwise.training.checks import check_training

LEARNER = "algorithm.old_logprobs=learner"


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ((LEARNER, "training.max_lag=1", "algorithm.correction=none"), True),
        ((LEARNER, "training.max_lag=1"), False),
        ((LEARNER, "training.max_lag=1", "algorithm.correction=token"), False),
        ((LEARNER, "training.max_lag=0", "algorithm.correction=none"), False),
        (("training.max_lag=1",), False),
        (("training.max_lag=1", "algorithm.loss=reinforce"), True),
        (("training.max_lag=1", "algorithm.loss=reinforce", "algorithm.old_logprobs=null"), False),
    ],
)
def test_stale_episodes_without_a_bound_are_told(overrides, warned):
    config = configure("rollout.tools=[calculate]", *overrides)
    text = plan_text(prepare(config, "train", limit=2))
    assert ("can collapse; set algorithm.old_logprobs=learner algorithm.correction=token" in text) is warned


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


NULL = "algorithm.old_logprobs=null"  # the arithmetic task takes the sampler's


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (("training.max_lag=0", NULL),
         ("max_lag 0", "no importance weights; the loss compares with the sampler's log-probs (every token comes from the newest weights)")),
        (("training.max_lag=2", NULL),
         ("max_lag 2", "no importance weights; the loss compares with the sampler's log-probs (tokens are at most 2 steps old, "
          "and a ratio to the log-probs they were drawn with corrects for that)")),
        (("training.max_lag=2", "algorithm.old_logprobs=learner"),
         ("max_lag 2", "importance weights: token, truncate; the loss compares with the learner's log-probs (tokens are at most 2 steps old)")),
        (("training.max_lag=2", NULL, "algorithm.loss=reinforce"),
         ("max_lag 2", "importance weights: token, truncate; the loss compares with the learner's log-probs (tokens are at most 2 steps old)")),
        (("training.max_lag=1",), ("max_lag 1", "no importance weights; the loss compares with the sampler's log-probs (tokens are at most 1 step old, "
              "and a ratio to the log-probs they were drawn with corrects for that)")),
        (("training.max_lag=2", NULL, "algorithm.correction=none"),
         ("max_lag 2", "no importance weights; the loss compares with the sampler's log-probs (as set)")),
        (("training.max_lag=0", NULL, "algorithm.correction=sequence"),
         ("max_lag 0", "importance weights: sequence, truncate; the loss compares with the learner's log-probs (as set)")),
        (("training.max_lag=0", "algorithm.old_logprobs=learner", "training.replay_groups=40", "training.groups=12"),
         ("max_lag 0; of 40 kept groups 4 a step are trained on again, 1 time(s) within 4 step(s)",
          "importance weights: token, truncate; the loss compares with the learner's log-probs (tokens are at most 4 steps old)")),
    ],
)  # fmt: skip
def test_the_plan_says_how_old_tokens_may_be_and_what_corrects_it(overrides, lines):
    prepared = prepare(configure("rollout.tools=[calculate]", *overrides), "train", limit=2)
    text = plan_text(prepared, training=True)
    assert f"staleness    {lines[0]}\n             {lines[1]}\n" in text
    assert "staleness" not in plan_text(prepared)


def test_options_of_a_correction_that_is_left_out_are_refused():
    for overrides in (("training.max_lag=0", NULL), ("training.max_lag=1",), ("training.max_lag=1", NULL)):
        with pytest.raises(ConfigError, match="correction_threshold=3.0 has no effect: nothing is corrected here"):
            check_training(configure("algorithm.correction_threshold=3", *overrides))
    check_training(
        configure("algorithm.correction_threshold=3", "training.max_lag=1", "algorithm.old_logprobs=learner")
    )


def test_an_endpoint_leaves_no_tokens():
    config = configure("engine=openai", "engine.base_url=http://127.0.0.1:9/v1", "rollout.tools=[calculate]")
    text = plan_text(prepare(config, "test", limit=2))
    assert "model (asked from the endpoint); messages only: no tokens and no log-probs are recorded" in text
