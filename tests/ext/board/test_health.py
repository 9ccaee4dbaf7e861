"""Each detector fires on a run that has its trouble, stays quiet on a near miss, and lists exactly the rows behind it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest

from turnwise.ext.board.detectors import episodes as detectors_episodes
from turnwise.ext.board.detectors import learning as detectors_learning
from turnwise.ext.board.detectors import reward as detectors_reward
from turnwise.ext.board.filters import compile as compile_filter
from turnwise.ext.board.findings import Severity
from turnwise.ext.board.health import DETECTORS, SHORTEST_RUN, findings, health
from turnwise.ext.board.series import Series
from turnwise.ext.board.table import Table, listing
from turnwise.ledger import TokenTrainingData
from turnwise.storage.index import INDEX, record, shard_of
from turnwise.storage.run_dir import METRICS, RunDir
from turnwise.types import CallRecord, CallStatus, StopReason, ToolCall, Trajectory

STEPS, GROUPS, SIBLINGS = 10, 6, 4
EPISODES = GROUPS * SIBLINGS
EVERY = 2


@dataclass(frozen=True)
class Place:
    """Where in a run an episode stands: `p` goes from 0 at the first step to 1 at the last."""

    step: int
    number: int

    @property
    def p(self) -> float:
        return self.step / (STEPS - 1)

    def share(self, part: float) -> bool:
        """True for this part of a step's episodes, others in every step, spread over the groups."""
        return (self.number * 7 + self.step * 5) % EPISODES < part * EPISODES


@dataclass(frozen=True)
class Scene:
    """What a made-up run does: its episodes as changes to a plain one, its metrics, its evaluations."""

    episode: Callable[[Place], dict[str, Any]] = lambda place: {}
    metrics: Callable[[float], dict[str, float | None]] = lambda p: {}
    evaluation: Callable[[Place], dict[str, Any]] | None = None


Run = tuple[Table, Series]
BUILT: dict[tuple[int, int, int], tuple[Scene, Run]] = {}
"""Runs are only read, so each scene is written once."""


@pytest.fixture
def build(tmp_path, make) -> Callable[..., Run]:
    """Writes a scene's index and metrics as the recorder does, and opens them; `first` is the first step's number."""

    def one(place: Place, step: int, changes: dict[str, Any]) -> Trajectory:
        tokens, entropy, gap = (changes.pop(name, None) for name in ("tokens", "entropy", "gap"))
        plain = {"reward": float(place.share(0.5)), "answer": f"It is {place.number} in step {place.step}."}
        made = make(f"s{place.number // SIBLINGS}", step=step, sibling=place.number % SIBLINGS, **(plain | changes))
        if tokens is not None:
            made.turns = [replace(turn, completion_tokens=tokens // len(made.turns)) for turn in made.turns]
        if entropy is not None or gap is not None:
            ledger = made.segments[0]
            ours = [value + (gap or 0.0) for value in ledger.logprobs]
            ledger.training = TokenTrainingData(logprobs=ours, entropies=[entropy or 0.0] * len(ledger))
        return made

    def write(scene: Scene, *, steps: int = STEPS, first: int = 0) -> Run:
        if (id(scene), steps, first) in BUILT:
            return BUILT[id(scene), steps, first][1]
        shards, metrics = [], []
        for step in range(steps):
            places = [Place(step, number) for number in range(EPISODES)]
            episodes = [one(place, first + step, dict(scene.episode(place))) for place in places]
            shards.append(shard_of(f"trajectories/step_{first + step + 1:06d}.parquet", episodes))
            metrics.append({"step": first + step + 1} | scene.metrics(step / (STEPS - 1)))
            if scene.evaluation is not None and step % EVERY == EVERY - 1:
                judged = [one(place, -1, dict(scene.evaluation(place))) for place in places]
                shards.append(shard_of(f"eval/step_{first + step + 1:06d}.parquet", judged))
        for name, lines in ((INDEX, map(asdict, shards)), (METRICS, metrics)):
            (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        run = opened(RunDir(tmp_path))
        BUILT[id(scene), steps, first] = scene, run
        return run

    return write


def opened(run_dir: RunDir) -> tuple[Table, Series]:
    table, series = Table(run_dir), Series(run_dir)
    table.refresh(None)
    series.refresh()
    return table, series


# --- scenes: what sets a detector off, and what nearly does -----------------------------------------------------------


def paid_for(what: Callable[[Place], bool], right: Callable[[Place], bool]) -> Callable[[Place], dict[str, Any]]:
    """A reward of two parts."""

    def episode(place: Place) -> dict[str, Any]:
        parts = {"acc": float(right(place)), "style": float(what(place))}
        return {"parts": parts, "reward": sum(parts.values())}

    return episode


def calls(*codes: str, status: CallStatus = CallStatus.OK) -> dict[str, Any]:
    made = [ToolCall(f"call_{number}", "python", {"code": code}) for number, code in enumerate(codes)]
    return {"calls": [CallRecord(call, status, 0.1) for call in made]}


def some(part: Callable[[Place], float], then: dict[str, Any]) -> Callable[[Place], dict[str, Any]]:
    """These changes for a part of the episodes."""
    return lambda place: then if place.share(part(place)) else {}


def alike(groups: int, reward: float) -> Callable[[Place], dict[str, Any]]:
    """So many of the groups say one thing."""

    def episode(place: Place) -> dict[str, Any]:
        group = place.number // SIBLINGS
        return {"answer": f"It is {group}.", "reward": reward} if group < groups else {}

    return episode


def curve(name: str, start: float, end: float) -> Callable[[float], dict[str, float | None]]:
    """A metric that goes from one value to another in equal factors."""
    return lambda p: {name: start * (end / start) ** p}


def flipped(worse: float, better: float) -> Callable[[Place], dict[str, Any]]:
    """Evaluated answers: some turned wrong, some turned right, the others right before and after."""

    def episode(place: Place) -> dict[str, Any]:
        if place.share(worse):
            return {"first_right": True, "reward": 0.0}
        return {"first_right": not place.share(worse + better), "reward": 1.0}

    return episode


def passing(then: dict[str, Any], else_: dict[str, Any] | None = None) -> Scene:
    """These changes for most episodes of two steps in the middle: neither end of the run shows them."""
    return Scene(lambda place: then if place.step in (5, 6) and place.share(0.8) else else_ or {})


def steady(then: dict[str, Any]) -> Scene:
    """The same changes at every step: a habit, no burst."""
    return Scene(some(lambda place: 0.5, then))


BAD = {"failure": "the sandbox could not be reached", "stop": StopReason.FAILED, "reward": None}
CUT = {"stop": StopReason.TURN_TRUNCATED}
MALFORMED, ERROR = (calls("", status=status) for status in (CallStatus.MALFORMED, CallStatus.ERROR))
SCENES: dict[str, tuple[Scene, Scene]] = {
    "reward_without_accuracy": (
        Scene(paid_for(lambda place: place.share(place.p), lambda place: place.share(0.4))),
        Scene(paid_for(lambda place: place.share(place.p), lambda place: place.share(0.2 + 0.6 * place.p))),
    ),
    "print_only": (
        Scene(some(lambda place: 0.5 * place.p, calls("print(42)"))),
        Scene(some(lambda place: 0.05, calls("print(42)"))),
    ),
    "duplicate_calls": (
        Scene(some(lambda place: place.p, calls("x = 1", "x = 1"))),
        Scene(some(lambda place: place.p, calls("x = 1", "x = 2"))),
    ),
    "malformed_calls": (
        Scene(some(lambda place: 0.6 * place.p, calls("", status=CallStatus.MALFORMED))),
        Scene(some(lambda place: 0.3, calls("", status=CallStatus.MALFORMED))),
    ),
    "truncation": (Scene(some(lambda place: 0.5 * place.p, CUT)), Scene(some(lambda place: 0.5, CUT))),
    "length_drift": (
        Scene(lambda place: {"tokens": int(40 + 100 * place.p) + place.number}),
        Scene(lambda place: {"tokens": int(40 + 10 * place.p) + place.number}),
    ),
    "infrastructure": (
        Scene(some(lambda place: 0.3 * place.p, BAD)),
        Scene(some(lambda place: 0.3 if place.step == 0 else 0.0, BAD)),
    ),
    "tool_use_vanishing": (
        Scene(some(lambda place: place.p * 1.6, {"calls": []})),
        Scene(some(lambda place: place.p * 0.4, {"calls": []})),
    ),
    "reward_fell": (
        Scene(lambda place: {"reward": float(place.share(0.9 if place.p < 0.6 else 0.1))}),
        Scene(lambda place: {"reward": float(place.share(0.6 if place.p < 0.6 else 0.5))}),
    ),
    "entropy_collapse": (
        Scene(lambda place: {"entropy": 0.5 * 0.02**place.p}, curve("actor/entropy", 0.5, 0.01)),
        Scene(lambda place: {"entropy": 0.5 * 0.5**place.p}, curve("actor/entropy", 0.5, 0.2)),
    ),
    "entropy_explosion": (
        Scene(metrics=curve("actor/entropy", 0.2, 3.0)),
        Scene(metrics=curve("actor/entropy", 0.001, 0.05)),
    ),
    "sampler_gap": (
        Scene(lambda place: {"gap": 0.005 * 40**place.p}, curve("rollout_corr/abs_diff_mean", 0.005, 0.2)),
        Scene(lambda place: {"gap": 0.2}, curve("rollout_corr/abs_diff_mean", 0.2, 0.2)),
    ),
    "kl_blow_up": (
        Scene(metrics=curve("actor/ppo_kl", 0.001, 2.0)),
        Scene(metrics=curve("actor/ppo_kl", 0.0001, 0.04)),
    ),
    "gradient_spikes": (
        Scene(metrics=lambda p: {"actor/grad_norm": 5.0 if p > 0.8 else 0.1}),
        Scene(metrics=lambda p: {"actor/grad_norm": 0.8 if p > 0.8 else 0.1}),
    ),
    "not_finite": (
        Scene(metrics=lambda p: {"actor/pg_loss": None if p > 0.8 else 0.1, "actor/entropy": 0.3}),
        Scene(metrics=lambda p: {"actor/pg_loss": 0.1, "actor/entropy": 0.3}),
    ),
    "equal_groups": (
        Scene(lambda place: {"reward": 0.0 if place.number >= SIBLINGS else float(place.number % 2)}),
        Scene(lambda place: {"reward": 0.0 if place.number < 2 * SIBLINGS else float(place.number % 2)}),
    ),
    "identical_siblings": (Scene(alike(GROUPS, 0.0)), Scene(alike(GROUPS // 2, 1.0))),
    "malformed_burst": (passing(MALFORMED), steady(MALFORMED)),
    "tool_error_burst": (passing(ERROR), steady(ERROR)),
    "truncation_burst": (passing(CUT), steady(CUT)),
    "failure_burst": (passing(BAD), steady(BAD)),
    "print_only_burst": (passing(calls("print(42)")), steady(calls("print(42)"))),
    "duplicate_burst": (passing(calls("x = 1", "x = 1")), steady(calls("x = 1", "x = 1"))),
    "tools_unused_burst": (passing({"calls": []}), steady({"calls": []})),
    "flat_burst": (
        Scene(lambda place: {"reward": 0.0} if place.step in (5, 6) else {}),
        Scene(lambda place: {"reward": 0.0} if place.number < 2 * SIBLINGS else {}),
    ),
    "reward_dip": (passing({"reward": -1.0}), steady({"reward": -1.0})),
    "length_burst": (passing({"tokens": 200}, {"tokens": 40}), steady({"tokens": 200})),
    "feedback_hurts": (Scene(evaluation=flipped(0.4, 0.1)), Scene(evaluation=flipped(0.25, 0.25))),
}
BY_NAME = {detector.__name__: detector for detector in DETECTORS}


def test_every_detector_has_its_scenes():
    assert set(SCENES) == set(BY_NAME)


@pytest.mark.parametrize("name", SCENES)
def test_trouble_is_found_and_its_trajectories_are_listed(build, name):
    table, series = build(SCENES[name][0])
    finding = BY_NAME[name](table, series)
    assert finding is not None and finding.id == name
    assert finding.severity is not Severity.OK, finding.text
    assert any(character.isdigit() for character in finding.text) and finding.advice
    assert finding.steps is not None and 0 <= finding.steps[0] <= finding.steps[1] <= STEPS
    assert finding.filter is not None and finding.count
    assert listing(table, split=finding.split, filter=finding.filter)["matched"] == finding.count
    assert listing(table, split="all", filter=finding.filter)["matched"] == finding.count


@pytest.mark.parametrize("name", SCENES)
def test_a_near_miss_is_fine(build, name):
    table, series = build(SCENES[name][1])
    finding = BY_NAME[name](table, series)
    assert finding is not None and finding.severity is Severity.OK, finding and finding.text
    assert finding.filter is None and finding.count is None


@pytest.mark.parametrize("name", ["reward_without_accuracy", "gradient_spikes", "feedback_hurts", "identical_siblings"])
def test_the_number_of_the_first_step_does_not_matter(build, name):
    def told(run: Run, less: int) -> list[Any]:
        return [
            (one.id, one.severity, one.count, one.steps and (one.steps[0] - less, one.steps[1] - less))
            for one in findings(*run)
        ]

    here = told(build(SCENES[name][0]), 0)
    assert any(severity is not Severity.OK for _, severity, _, _ in here)
    assert told(build(SCENES[name][0], first=5000), 5000) == here


@pytest.mark.parametrize("name", [name for name in SCENES if name.endswith(("_burst", "_dip"))])
def test_what_came_and_went_is_found_where_it_was(build, name):
    finding = BY_NAME[name](*build(SCENES[name][0]))
    assert finding is not None and finding.steps == (6, 7), finding
    early = Scene(lambda place: SCENES[name][0].episode(replace(place, step=(place.step + 6) % STEPS)))
    begun = BY_NAME[name](*build(early))
    assert begun is not None and begun.severity is Severity.OK, "what a run begins with is no burst"


def test_few_episodes_with_very_many_malformed_calls_are_seen(build):
    """Fewer than a tenth of the episodes, but most of the calls of a step."""
    again = calls(*["x = 1"] * 20, status=CallStatus.MALFORMED)
    groups = [SIBLINGS * number for number in range(3)]

    def scene(at: tuple[int, ...]) -> Scene:
        return Scene(lambda place: again if place.step in at and place.number in groups else calls("x = 1"))

    finding = BY_NAME["malformed_burst"](*build(scene((6,))))
    assert finding is not None and finding.severity is Severity.WATCH and finding.steps == (7, 7)
    assert finding.count == 3 and "(60 of " in finding.text and "0.0 % in the median step" in finding.text
    begun = BY_NAME["malformed_burst"](*build(scene((0,))))
    assert begun is not None and begun.severity is Severity.OK
    habit = BY_NAME["malformed_burst"](*build(scene(tuple(range(STEPS)))))
    assert habit is not None and habit.severity is Severity.OK


@pytest.mark.parametrize(
    ("name", "metric", "usual", "middle"),
    [
        ("entropy_collapse", "actor/entropy", 0.5, 0.01),
        ("entropy_explosion", "actor/entropy", 0.2, 3.0),
        ("sampler_gap", "rollout_corr/abs_diff_mean", 0.005, 0.2),
        ("kl_blow_up", "actor/ppo_kl", 0.001, 2.0),
    ],
)
def test_a_metric_that_was_bad_in_the_middle_is_to_be_watched(build, name, metric, usual, middle):
    run = build(Scene(metrics=lambda p: {metric: middle if 0.85 < p < 1.25 else usual}), steps=2 * STEPS)
    finding = BY_NAME[name](*run)
    assert finding is not None and finding.severity is Severity.WATCH and finding.steps == (9, 12), finding


# --- what the lists hold ----------------------------------------------------------------------------------------------


def rows_behind(table: Table, series: Series, name: str) -> tuple[np.ndarray, Any]:
    finding = BY_NAME[name](table, series)
    assert finding is not None and finding.filter is not None
    return compile_filter(finding.filter).mask(table), finding


def test_rewarded_and_wrong_trajectories_are_behind_a_reward_without_accuracy(build):
    table, series = build(SCENES["reward_without_accuracy"][0])
    mask, finding = rows_behind(table, series, "reward_without_accuracy")
    assert (table.column("right")[mask] == 0).all() and (table.column("reward")[mask] == 1.0).all()
    assert table.column("step")[mask].min() >= finding.steps[0]


def test_a_metric_leads_to_the_trajectories_of_its_step(build):
    table, series = build(SCENES["gradient_spikes"][0])
    mask, finding = rows_behind(table, series, "gradient_spikes")
    assert finding.steps == (9, 10)
    assert sorted(set(table.column("step")[mask].tolist())) == [9, 10]


def test_identical_siblings_are_listed_by_group(build):
    table, series = build(SCENES["identical_siblings"][0])
    mask, finding = rows_behind(table, series, "identical_siblings")
    assert finding.severity is Severity.ALARM
    assert mask.sum() == finding.count == 4 * EPISODES


def test_right_and_wrong_groups_are_told_apart(build):
    table, series = build(Scene(lambda place: {"reward": 1.0}))
    finding = detectors_reward.equal_groups(table, series)
    assert finding is not None and finding.severity is Severity.WATCH, "a solved task is no alarm"
    assert "right == true" in (finding.filter or "") and finding.count == 4 * EPISODES


def test_a_reward_that_rose_and_fell_is_compared_with_its_best(build):
    scene = Scene(lambda place: {"reward": float(place.share(0.9 if 0.3 < place.p < 0.6 else 0.2))})
    finding = detectors_reward.reward_fell(*build(scene))
    assert finding is not None and finding.severity is not Severity.OK
    assert finding.steps == (7, 10) and "reward <" in (finding.filter or "")


def test_shrinking_is_drift_too(build):
    table, series = build(Scene(lambda place: {"tokens": int(140 * 0.2**place.p) + place.number % 4}))
    finding = detectors_episodes.length_drift(table, series)
    assert finding is not None and finding.severity is Severity.ALARM and "policy_tokens <" in (finding.filter or "")


def test_growing_with_the_reward_is_only_to_be_watched(build):
    scene = Scene(lambda place: {"tokens": int(40 + 140 * place.p), "reward": float(place.share(place.p))})
    finding = detectors_episodes.length_drift(*build(scene))
    assert finding is not None and finding.severity is Severity.WATCH and "rose with it" in finding.text


def test_flat_evaluations_outweigh_training_answers(build):
    scene = Scene(
        paid_for(lambda place: False, lambda place: place.share(0.2 + 0.7 * place.p)),
        lambda p: {"val/accuracy": 0.4},
    )
    finding = detectors_reward.reward_without_accuracy(*build(scene))
    assert finding is not None and finding.severity is not Severity.OK
    assert "evaluations" in finding.text and "overfitting" in finding.advice and finding.count


def test_a_reward_on_a_scale_of_its_own_says_nothing_about_accuracy(build):
    scene = Scene(lambda place: {"reward": 0.5 * place.p + place.number / 100, "parts": {"style": 0.5}})
    assert detectors_reward.reward_without_accuracy(*build(scene)) is None


def test_a_growing_kl_to_the_reference_is_judged_by_its_own_scale(build):
    scene = Scene(metrics=lambda p: {"actor/ppo_kl": 0.001, "actor/kl_loss": 0.001 * 300**p, "actor/kl_coef": 9.0 * p})
    finding = detectors_learning.kl_blow_up(*build(scene))
    assert finding is not None and finding.severity is Severity.OK, "0.3 nats to the reference is no blow-up"


def test_curves_come_from_the_trajectories_when_there_is_no_metric(build):
    scene = Scene(lambda place: {"entropy": 0.5 * 0.02**place.p})
    finding = detectors_learning.entropy_collapse(*build(scene))
    assert finding is not None and finding.severity is Severity.ALARM and finding.count


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["infrastructure", "not_finite", "feedback_hurts", "equal_groups", "malformed_calls"])
def test_a_short_run_never_alarms(build, name):
    table, series = build(SCENES[name][0], steps=SHORTEST_RUN - 1)
    found = {finding.id: finding for finding in findings(table, series)}
    assert found["too_early"].severity is Severity.OK
    assert all(finding.severity is not Severity.ALARM for finding in found.values())
    assert set(found) <= {"too_early", "infrastructure", "not_finite", "feedback_hurts"}


def test_a_failure_is_told_even_in_a_short_run(build):
    table, series = build(Scene(some(lambda place: 0.5, BAD)), steps=3)
    first = findings(table, series)[0]
    assert (first.id, first.severity) == ("infrastructure", Severity.WATCH)
    assert BAD["failure"] in first.text and first.count


def test_constant_series_are_fine(build):
    names = ("actor/entropy", "actor/ppo_kl", "actor/kl_loss", "actor/grad_norm", "loss", "rollout_corr/abs_diff_mean")
    for value in (0.0, 1e-9, 3.0):
        table, series = build(Scene(metrics=lambda p, value=value: dict.fromkeys(names, value)))
        assert {finding.severity for finding in findings(table, series)} == {Severity.OK}


def test_a_run_that_learns_is_fine(build):
    scene = Scene(
        lambda place: {"reward": float(place.share(0.3 + 0.5 * place.p)), "tokens": 50 + place.number},
        lambda p: {
            "actor/entropy": 0.4 - 0.2 * p,
            "actor/ppo_kl": 0.002,
            "actor/kl_loss": 0.001 + 0.05 * p,
            "actor/grad_norm": 0.1 + 0.2 * p,
            "val/accuracy": 0.3 + 0.4 * p,
        },
        flipped(0.1, 0.3),
    )
    table, series = build(scene)
    found = findings(table, series)
    assert {finding.severity for finding in found} == {Severity.OK}
    assert {finding.id for finding in found} == set(BY_NAME) - {"sampler_gap"}, "it has no such numbers"


def test_alarms_come_first_and_the_answer_is_plain_json(build):
    table, series = build(SCENES["infrastructure"][0])
    answer = json.loads(json.dumps(health(table, series), allow_nan=False))
    order = [("alarm", "watch", "ok").index(finding["severity"]) for finding in answer["findings"]]
    assert order == sorted(order) and order[0] == 0
    names = "id severity title text advice steps filter split metrics count"
    assert set(answer["findings"][0]) == set(names.split())
    assert answer["pending"] == 0


def test_a_table_that_is_still_being_read_says_so_first(run_dir, make):
    for step in range(3):
        record(run_dir, f"trajectories/step_{step:06d}.parquet", [make(step=step)])
    table, series = Table(run_dir), Series(run_dir)
    table.refresh(0.0)
    assert table.size == 1 and table.pending
    assert findings(table, series)[0].id == "reading" and health(table, series)["pending"] == table.pending
    table.refresh(None)
    assert "reading" not in {finding.id for finding in findings(table, series)}


def test_an_empty_run_and_one_with_metrics_only_have_nothing_to_list(run_dir):
    assert [finding.id for finding in findings(*opened(run_dir))] == ["too_early"]
    for step in range(STEPS):
        run_dir.append_jsonl(METRICS, {"step": step + 1, "actor/entropy": 0.5 * 0.5**step})
    found = findings(*opened(run_dir))
    assert (found[0].id, found[0].severity) == ("entropy_collapse", Severity.ALARM)
    assert all(finding.filter is None and finding.count is None for finding in found)
