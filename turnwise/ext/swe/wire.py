"""Requests and answers of a server of repositories: start_instance, process_action, postprocess, compute_reward."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from turnwise.ext.sandbox.results import Text
from turnwise.ext.swe.repository import Instance, SweTests

Sid = Annotated[str, Field(min_length=1, max_length=200)]


class SweStartRequest(BaseModel):
    """POST /start_instance. A server that knows the repository by its id needs no more of it."""

    instance_id: str
    instance: Instance | None = None


class StartAnswer(BaseModel):
    """The session's id, which every later request names."""

    sid: Sid


class Action(BaseModel):
    """A tool call: bash, edit or finish."""

    name: str
    arguments: dict[str, Any] = {}


class ActionRequest(BaseModel):
    """The body of POST /process_action."""

    sid: Sid
    action: Action


class ActionAnswer(BaseModel):
    """What the policy reads, whether the tool refused, and whether the episode is done."""

    observation: Text
    failed: bool = False
    done: bool = False
    facts: dict[str, Any] = {}


class EndRequest(BaseModel):
    """POST /postprocess: no more actions; what was changed is kept for the reward."""

    sid: Sid


class EndAnswer(BaseModel):
    """The answer to POST /postprocess: which files were changed."""

    changed: list[str] = []


class SweRewardRequest(BaseModel):
    """POST /compute_reward. A server that knows the tests by the instance's id needs none."""

    sid: Sid
    tests: SweTests | None = None


class RewardAnswer(BaseModel):
    """How many of the tests that had to pass did."""

    f2p_count: Annotated[int, Field(ge=0)]
    f2p_total: Annotated[int, Field(ge=1)]
    p2p_count: Annotated[int, Field(ge=0)] = 0
    p2p_total: Annotated[int, Field(ge=0)] = 0
