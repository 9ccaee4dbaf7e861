"""Knobs of an episode: its loop, tools, simulated user and limits; and of an evaluation, which plays episodes only."""

from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.config.choices import EvalSplit, Keep
from turnwise.config.knobs import (
    at_least,
    duration,
    harmless,
    knob,
    leads_away,
    only,
    path,
    reaches,
    share,
)
from turnwise.config.marks import changes_work, key_in, may_change


@dataclass
class RolloutConfig:
    """How an episode runs and what ends it. Null budgets are unlimited."""

    EVERY_KNOB: ClassVar = (changes_work(),)

    agent: str | None = knob(None, path(), reaches("code", leads_away))
    """Loop for rows that name none: a built-in one, an extension's or module:function; null infers it.
    Built in are single_turn, tool_calling, checker, task_functions, http_env, gym_env and until_finish; tools or an
    interaction let null be tool_calling. Set it to your own `file.py:loop`, or single_turn to leave tools unused."""
    agent_options: dict[str, Any] = knob(
        {},
        only("rollout.agent", "*"),
        reaches("network", None),
        key_in("TURNWISE_ENV_TOKEN", "token_env"),
    )
    """Options of that loop, such as {rounds: 2, trained: true} of the checker or {url: http://127.0.0.1:18950} of
    http_env; of your own, its keyword arguments. Set those of the loop in use; others are refused."""
    scripted_answer: str = knob("#### 0", harmless())
    """The answer used instead of the model's when a run is checked before its start. Set it where an agent or a scorer
    accepts only answers in a special form, such as '{"answer": 0}'."""
    tools: list[str] = knob([], path(), reaches("code", leads_away))
    """Tools the policy may call: built-in names, module:function, file.py:Class, or a YAML file with a list `tools`
    (docs/tools.md). Set it to offer your own."""
    tool_options: dict[str, Any] = knob({}, harmless())
    """Options by tool, such as {search: {timeout: 20, rate_limit: 5}} or {python: {frame: "<out>{output}</out>"}}
    (docs/tools.md). Set them for a tool that is slow or limited, or whose replies are long or need a frame."""
    interaction: str | None = knob(None, path(), reaches("code", leads_away))
    """A simulated user for rows that name none: a built-in name, an extension's, module:function or module:Class. Set
    it when answers should get a reply; with null the first answer without a tool call ends the episode."""
    interaction_kwargs: dict[str, Any] = knob(
        {},
        only("rollout.interaction", "*"),
        reaches("network", None),
        key_in(option="api_key_env"),
    )
    """Config of that interaction, such as {max_turns: 2}. Set what the class reads."""
    max_assistant_turns: int | None = knob(16, at_least(1))
    """Turns of the policy after which the episode ends. Raise it for tasks that need many tool calls."""
    max_user_turns: int | None = knob(None, at_least(0))
    """Messages of the simulated user after which the episode ends; tool replies do not count. Set it when the user
    would never stop."""
    max_parallel_calls: int = knob(8, at_least(1))
    """Tool calls of one turn that are run; each further one is answered with an error. Lower it when the policy floods
    an expensive tool."""
    max_malformed_calls: int = knob(3, at_least(1))
    """Turns in a row whose calls cannot be parsed, after which the episode ends. Raise it for a model that still learns
    the format."""
    max_tokens: int | None = knob(None, at_least(1))
    """Tokens after the first prompt, after which the episode ends: the policy's, the tools' and the user's together.
    Set it so that an episode fits the model's context."""
    max_images: int | None = knob(16, at_least(1))
    """Images shown to the model in one episode, those of the prompt included, after which it ends; a prompt with more
    is refused. Raise it when the model's context and memory have room for their tokens; null has no limit."""
    max_seconds: float | None = knob(600.0, duration())
    """Seconds of one episode, tools included; waiting for a slot or for new weights is not counted. Raise it for slow
    tools."""
    max_reply_tokens: int = knob(1024, at_least(1))
    """Tokens of a tool's reply; longer ones are cut as `rollout.keep` says. The tokenizer of an endpoint is not known:
    there a token counts as 4 characters. Raise it for tools that return pages, while the context has room."""
    keep: Keep = Keep.both
    """Which part of an over-long tool reply is kept. Take `tail` when the end matters, as with a traceback."""
    tool_timeout: float | None = knob(None, duration())
    """Seconds for one call of any tool; null uses each tool's own. Set it to bound tools that declare none."""
    concurrency: int | None = knob(None, at_least(1))
    """Episodes under way at once; null takes 256, and twice engine.max_batch on a GPU, so that it has work while tools
    run. With vLLM and SGLang it is twice what their servers decode together: engine.max_batch or their own option, else
    1,024 a server on a GPU of 70 GiB or more and 256 on a smaller one. Lower it when tools, users or an endpoint cannot
    serve as many."""
    workers: int | None = knob(None, at_least(0, 256))
    """Processes that play the episodes, each with tools, users and scorers of its own; 0 plays them in the run's own.
    The tokens are the same. Null takes 4 where a GPU of this machine writes and 4 cores are left for the run's own
    process, fewer where fewer are left, and 0 elsewhere. Raise it when one core is busy with episodes while the engine
    waits (docs/engines.md)."""
    max_failures: float = knob(0.5, share())
    """Share of failed episodes above which the run stops: of a training step's, or of an evaluation's so far. Lower it
    when no failure is normal, raise it when a service is known to be shaky."""


@dataclass
class EvalConfig:
    """How an evaluation is run: how many samples and episodes, and what is written."""

    split: EvalSplit = EvalSplit.test
    """The rows that are played. Take `train` to record a stronger model's episodes, for another to learn from."""
    samples: int | None = knob(128, at_least(1), may_change())
    """Samples evaluated, from the start; null takes all. Raise it for smaller error bars (four times as
    many halve them)."""
    group_size: int = knob(1, at_least(1), may_change())
    """Episodes per sample. Raise it to measure pass@k, or to average out the sampling."""
    sampling: dict[str, Any] = knob({}, harmless())
    """How evaluations are drawn where not as training is, by the names of `sampling`: {temperature: 0.6, top_p: 0.95}.
    What it does not name is training's. Set it to evaluate as the model will be used, or greedily (temperature: 0),
    while training draws at temperature 1."""
