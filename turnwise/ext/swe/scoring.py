"""The `swe_tests` scorer: a policy's changes to a repository against the tests of its ground truth, in the sandbox."""

import difflib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from turnwise.errors import ConfigError, DataError, ScoringFailed
from turnwise.errors.nearest_name import unknown
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.shell.pool import ShellPool
from turnwise.ext.sandbox.zygote_process import SandboxLost
from turnwise.ext.swe.remote import SID, SweClient, open_shells
from turnwise.ext.swe.repository import Instance, SuiteOutcome, SweTests, read_instance, read_tests, run_tests
from turnwise.scoring.client_options import client_options
from turnwise.scoring.event_loop_resources import KeptOpen, loop_resource
from turnwise.scoring.scorer import Score
from turnwise.types import CallStatus, Remark, Trajectory

KEY = "swe"
FINISH = "finish"


@client_options("partial")
async def swe_tests(
    trajectory: Trajectory,
    *,
    partial: float = 0.0,
    seconds: float = 60.0,
    memory_mb: int = 512,
    scratch_mb: int = 64,
    min_level: str = "L2",
    url: str | None = None,
) -> Score:
    """1 when every test of FAIL_TO_PASS and PASS_TO_PASS passes on the changed repository, else 0.

    `partial` is what a part of FAIL_TO_PASS is worth while all of PASS_TO_PASS pass. Parts: `acc` is 1 when all pass,
    `f2p` and `p2p` are shares, `patch_lines` counts lines added and removed, `finished` is 1 when the policy said so.
    With `url` the server of repositories that the episode used runs the tests; the other options are the sandbox's.
    """
    where = f"sample {trajectory.sample.id}"
    extra = trajectory.sample.info.get("extra_info", {})
    try:
        instance = read_instance(extra.get(KEY), f"{where}: extra_info.{KEY}")
        tests = read_tests(trajectory.sample.ground_truth, f"{where}: reward_model.ground_truth")
    except DataError as error:
        raise ConfigError(f"scorer swe_tests: {error}") from error
    config = _sandbox(seconds, memory_mb, scratch_mb, min_level)
    facts = _last_facts(trajectory)
    finished = any(record.call.name == FINISH and record.status is CallStatus.OK for record in trajectory.calls)
    try:
        outcome, remarks = await _judge(config, url, instance, tests, facts, seconds)
    except SandboxLost as error:
        raise ScoringFailed(f"the sandbox failed: {error}") from error
    f2p = outcome.f2p_count / outcome.f2p_total
    p2p = outcome.p2p_count / outcome.p2p_total if outcome.p2p_total else 1.0
    reward = 1.0 if outcome.resolved else partial * f2p if p2p == 1.0 else 0.0
    parts = {"acc": float(outcome.resolved), "f2p": f2p, "p2p": p2p, "finished": float(finished)}
    if "changes" in facts:
        parts["patch_lines"] = float(patch_lines(instance.files, facts["changes"]))
    return Score(reward, parts, remarks=remarks)


async def _judge(
    config: SandboxConfig,
    url: str | None,
    instance: Instance,
    tests: SweTests,
    facts: Mapping[str, Any],
    seconds: float,
) -> tuple[SuiteOutcome, tuple[Remark, ...]]:
    if url is not None:
        client = await _opened(config, url)
        assert isinstance(client, SweClient)
        sid = facts.get(SID) or await client.start(instance)  # a policy that called no tool left it as it was
        return await client.compute_reward(sid, tests if instance.files else None), ()
    if not instance.files:
        raise ScoringFailed(
            f"{instance.instance_id}: the row holds no files, and no server can be asked: set "
            "scoring.options.swe_tests.url to the same address as swe.url"
        )
    if "changes" not in facts:
        why = facts.get("too_much", facts.get("refused", ""))
        none = SuiteOutcome(0, len(set(tests.FAIL_TO_PASS)), 0, len(set(tests.PASS_TO_PASS)))
        return none, (Remark("swe_tests", f"the changes cannot be judged: {why}"),)
    pool = await _opened(config, None)
    assert isinstance(pool, ShellPool)
    return await run_tests(pool, instance, facts["changes"], tests, seconds), ()


def _last_facts(trajectory: Trajectory) -> dict[str, Any]:
    """What the newest record says of the changes, and which session it was at a server; no record is no change."""
    facts: dict[str, Any] = {"changes": {}}
    for record in trajectory.calls:
        if {"changes", "too_much", "refused"} & set(record.info):
            facts = {SID: facts[SID]} if SID in facts else {}
        facts |= {key: record.info[key] for key in ("changes", "too_much", "refused", SID) if key in record.info}
    return facts


def patch_lines(before: Mapping[str, str], changes: Mapping[str, str | None]) -> int:
    """How many lines the changes add and remove together."""
    total = 0
    for name, text in changes.items():
        old, new = before.get(name, "").splitlines(), (text or "").splitlines()
        total += sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in difflib.unified_diff(old, new))
    return total


def _sandbox(seconds: float, memory_mb: int, scratch_mb: int, min_level: str) -> SandboxConfig:
    if min_level not in SandboxLevel.__members__:
        raise ConfigError(f"scoring.options, scorer swe_tests: {unknown('level', min_level, SandboxLevel.__members__)}")
    return SandboxConfig(
        min_level=SandboxLevel[min_level], seconds=seconds, memory_mb=memory_mb, scratch_mb=scratch_mb, preload=[],
    )  # fmt: skip


Place = ShellPool | SweClient


async def _opened(config: SandboxConfig, url: str | None) -> Place:
    """One of these settings in the running event loop; `close_loop_resources` closes it."""
    key = ("swe", f"{config} {url}")
    resource: KeptOpen[Place] = loop_resource(KeptOpen, key, lambda: KeptOpen(lambda: _place(config, url)))
    return await resource.opened()


def _place(config: SandboxConfig, url: str | None) -> AbstractAsyncContextManager[Place]:
    return open_shells(config, url)
