"""The error classes: what the model may read, what ends one episode, and what stops the run.

1. `ToolError` becomes the tool's reply to the model; the episode continues.
2. `EpisodeError` ends one episode; its text is recorded on the trajectory and the episode is left out of baselines.
3. `ScoringFailed` leaves one trajectory without a reward and out of baselines; it is counted, never a zero.
4. `TurnwiseError` is a mistake a person can mend (config, data, plug-in); it stops the command with one message.
5. `EngineLost` is one of these that may pass: a turn is asked again, and the episode fails after the last try. So may
   `MachineryLost`: in an episode it ends that episode, in a scorer it is `ScoringFailed`, at the start it ends the run.
6. Everything else is a bug and stops the run with its traceback.
"""

from turnwise.errors.address_passwords import without_userinfo


class TurnwiseError(Exception):
    """A mistake a person can mend; the CLI prints its text without a traceback, and no password of an address."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_userinfo(argument) if isinstance(argument, str) else argument for argument in args))


class ConfigError(TurnwiseError):
    """A configuration key, value or name that cannot be used."""


class DataError(TurnwiseError):
    """A dataset file or row that cannot be used; the text names file, row and field."""


class PluginError(TurnwiseError):
    """A tool, interaction, scorer or loop that cannot be found or has the wrong signature."""


class TemplateError(TurnwiseError):
    """A chat template that cannot be extended token by token."""


class EngineError(TurnwiseError):
    """A sampler that cannot be built or cannot serve a request."""


class EngineLost(EngineError):
    """A server or a node went away while it served a request: the episode asks again for the same turn."""

    def __init__(self, problem: str, *, elsewhere: bool = False) -> None:
        super().__init__(problem)
        self.elsewhere = elsewhere
        """Whether another replica serves already, so that there is no need to wait."""


class WeightsSuperseded(EngineError):
    """Weights that cannot be had any more, since newer ones are on their way: the sampler is well as it was before."""


class MachineryLost(TurnwiseError):
    """What runs a policy's calls failed, not the calls: it says nothing about them, and they may be tried again."""


class StorageError(TurnwiseError):
    """A run directory that cannot be written or read."""


class ToolError(Exception):
    """A tool's failure that the model gets as the reply; the episode continues."""


class ScoringFailed(Exception):
    """Scoring failed (a worker, a service, a judge, a scorer that raised), which says nothing about the trajectory."""


class EpisodeError(Exception):
    """A failure that ends one episode and is recorded on its trajectory."""


def first_cause(error: BaseException) -> BaseException:
    """What went wrong: the error itself, or the first one of a group of them, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def one_line(error: BaseException) -> str:
    """An error as a person reads it in a status: its cause, on one line. A bug has its kind before its text."""
    cause = first_cause(error)
    text = " ".join(str(cause).split())
    if isinstance(cause, TurnwiseError) and text:
        return text
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
