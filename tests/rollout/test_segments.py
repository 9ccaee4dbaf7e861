"""A template that rewrites history: the turns after it stand in a second ledger, exactly as the sampler saw it."""

from dataclasses import replace

import pytest

from turnwise.config.choices import HistoryPolicy
from turnwise.reports.evaluation import step_metrics
from turnwise.rollout.tools.calculate import calculate
from turnwise.training.sequences import to_sequences
from turnwise.types import Ledger, Origin, StopReason

# Reasoning of an assistant message is dropped once a user speaks again, and kept after a tool: as many models do it.
FORGETFUL = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == "assistant" and "</think>" in m.content and loop.index0 < ns.last -%}
{{ m.content.split("</think>")[-1].lstrip("\\n") }}
{%- else -%}
{{ m.content }}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def thought(text, words="long thoughts about six and seven"):
    return f"<think>\n{words}\n</think>\n\n{text}"


@pytest.fixture
def segmenting(rollouts):
    return rollouts.renderer_with(FORGETFUL, HistoryPolicy.segment)


def test_a_rewritten_history_opens_a_second_ledger(rollouts, segmenting):
    rollout = rollouts.make([thought("#### 41"), thought("#### 42")], renderer=segmenting, interaction="code_verify")
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert trajectory.stop_reason is StopReason.USER_ENDED
    assert [(turn.segment, turn.index) for turn in trajectory.turns] == [(0, 0), (1, 1)]
    first, second = trajectory.segments
    decode = segmenting.tokenizer.decode
    assert "long thoughts" in decode(first.token_ids)
    assert decode(second.token_ids).count("long thoughts") == 1, "only those of the second turn"
    assert set(second.origins.tolist()) == {Origin.PROMPT, Origin.POLICY}
    assert second.origins[: trajectory.turns[1].start].tolist() == [Origin.PROMPT] * trajectory.turns[1].start
    assert trajectory.render_check.exact
    assert len(to_sequences([trajectory])) == 2
    assert set(rollout.sampler.released.values()) == {1} and len(rollout.sampler.released) == 2
    assert len({request.noise.bits() for request in rollout.sampler.requests}) == 2, (
        "positions are counted anew, noise is not"
    )


def test_tool_replies_extend_the_segment_they_belong_to(rollouts, segmenting, call):
    said = [
        thought(call("calculate", expression="6*7")),
        thought("#### 42"),
        call("calculate", expression="7*6"),
        thought("#### 42"),
    ]
    rollout = rollouts.make(said, renderer=segmenting, tools=[calculate], interaction="code_verify")
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1, 1]
    assert trajectory.render_check.exact
    assert [turn.message.text for turn in trajectory.turns] == said, "the script's turns are counted through"
    for turn in trajectory.turns:
        ledger = trajectory.segments[turn.segment]
        assert ledger.loss_mask[turn.start] and not ledger.loss_mask[turn.start - 1]


def test_a_thought_far_back_is_rewritten_too(rollouts, segmenting, call):
    """The turn right before the user holds no reasoning; an earlier one does, and the template drops it."""
    said = [thought(call("calculate", expression="6*7")), "#### 42", "#### 42"]
    rollout = rollouts.make(said, renderer=segmenting, tools=[calculate], interaction="code_verify")
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1]
    assert trajectory.render_check.exact


def test_without_reasoning_there_is_one_ledger(rollouts, segmenting):
    rollout = rollouts.make(["#### 41", "#### 42"], renderer=segmenting, interaction="code_verify")
    trajectory = rollout.play()
    rollout.check_tokens(trajectory)
    assert len(trajectory.segments) == 1


def test_the_token_budget_counts_what_was_said_once(rollouts, segmenting):
    """History that is told again in a second ledger is no new use of tokens."""
    said = [thought("#### 41"), thought("#### 42")]
    settings = {"renderer": segmenting, "interaction": "code_verify"}
    free = rollouts.make(said, **settings).play()
    policy = sum(turn.completion_tokens for turn in free.turns)
    used = policy + len(segmenting.tokenizer.encode(free.turns[0].replies[0].text).ids)
    for budget, reason in ((used, StopReason.USER_ENDED), (used - 1, StopReason.TOKEN_BUDGET)):
        rollout = rollouts.make(said, **settings)
        rollout.context.config.rollout.max_tokens = budget
        trajectory = rollout.play()
        assert trajectory.stop_reason is reason, budget
        assert len(trajectory.turns) == 2
    rollout = rollouts.make(said, **settings)
    rollout.context.config.rollout.max_tokens = free.turns[0].completion_tokens + 3
    trajectory = rollout.play()
    assert (trajectory.stop_reason, len(trajectory.segments)) == (StopReason.TOKEN_BUDGET, 1)


def test_the_context_is_that_of_the_new_ledger(rollouts, segmenting):
    """Long thoughts that are dropped make room again."""
    said = [thought("#### 41", "so " * 100), "#### 42"]
    free = rollouts.make(said, renderer=segmenting, interaction="code_verify").play()
    longest = max(map(len, free.segments))
    assert len(free.segments[1]) < len(free.segments[0]) == longest
    rollout = rollouts.make(said, renderer=segmenting, interaction="code_verify", context_length=longest)
    assert rollout.play().stop_reason is StopReason.USER_ENDED


def test_refused_unless_asked_for(rollouts):
    strict = rollouts.renderer_with(FORGETFUL, HistoryPolicy.refuse)
    rollout = rollouts.make([thought("#### 41")], renderer=strict, interaction="code_verify")
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.FAILED, "what a policy wrote ends its episode, not the run"
    assert "rewrites history" in trajectory.failure and "chat.history=auto" in trajectory.failure
    assert sum(rollout.sampler.released.values()) == 1


def test_segments_are_counted_among_the_metrics(rollouts, segmenting):
    twice = rollouts.make(
        [thought("#### 41"), thought("#### 42")], renderer=segmenting, interaction="code_verify"
    ).play()
    once = rollouts.make(["#### 42"], renderer=segmenting, interaction="code_verify").play()
    found = step_metrics([twice, once])
    assert (found["segments/mean"], found["segments/max"], found["segments/min"]) == (1.5, 2, 1)


def test_every_segment_is_compared_with_a_full_render(rollouts, segmenting):
    """A fault in the first one was not seen while only the last was looked at."""
    rollout = rollouts.make([thought("#### 41"), thought("#### 42")], renderer=segmenting, interaction="code_verify")
    make, made = rollout.context.make_backend, []

    def make_backend(*given):
        made.append(make(*given))
        return made[-1]

    rollout.context = replace(rollout.context, make_backend=make_backend)
    trajectory = rollout.play()
    (backend,) = made
    assert len(backend.segments) == 2 and backend.check(trajectory.messages).exact
    first = backend.segments[0]
    ids = first.token_ids.copy()
    ids[5] = ids[6] + 1
    backend.segments[0] = Ledger.of(ids, first.origins, first.turns, first.logprobs, first.versions)
    found = backend.check(trajectory.messages)
    assert (found.exact, found.position) == (False, 5)
