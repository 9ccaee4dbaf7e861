"""A causal probe: the same episodes with the tools' images as they are and spoilt, and what that does to answers."""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from turnwise.config import Config
from turnwise.config.check import check_config
from turnwise.config.evaluation_sampling import evaluation_sampling
from turnwise.engines.samplers.scripted import Script
from turnwise.reports.checks.run_checks import check_before_run
from turnwise.reports.evaluation import Printable
from turnwise.reports.evaluation_run import play_all
from turnwise.reports.plan import plan_text
from turnwise.rollout.image_ablations import Donors, Probe, probed, tool_reply_images
from turnwise.rollout.prepare import Prepared, open_context, prepare
from turnwise.rollout.tools.tool import Tool
from turnwise.scoring.scorer import Scorer
from turnwise.storage.run_dir import check_free
from turnwise.system.metrics import Share, clustered_error, share
from turnwise.system.stopping import run_stoppable
from turnwise.training.runs.run import Run, console_or_stderr, new_run, printer
from turnwise.types import Sample, Trajectory

FILE = "probe.json"
BASELINE = "eval/step_000000.parquet"
"""Where a probe keeps the episodes as they are; the spoilt ones lie in probes/NAME.parquet, in the same order."""
PROBED = "probe"
"""The artifact that says which probe an episode was played under."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One probe on one data source. Only pairs count of which both episodes were scored."""

    data_source: str
    probe: str
    n: int
    samples: int
    looked: int
    """Episodes that were shown an image of a tool before the probe; the others are the same under it."""
    before: float
    before_stderr: float
    after: float
    after_stderr: float
    change: float
    """`after - before`."""
    change_stderr: float | None
    """Of the pairs: episodes of one sample count as one cluster. None of a single sample, which has no spread."""
    answers_changed: float
    """Share of episodes whose last words were others."""


@dataclass(frozen=True, slots=True, repr=False)
class ProbeReport(Printable):
    """A whole probe; it prints as its table."""

    run: Path
    seconds: float
    results: tuple[ProbeResult, ...]
    trajectories: dict[str, list[Trajectory]]
    """The episodes by probe; those as they are under the name "none"."""

    def of(self, source: str, probe: Probe) -> ProbeResult:
        """The result of one probe on one data source."""
        return next(result for result in self.results if (result.data_source, result.probe) == (source, probe))

    def as_json(self) -> dict[str, Any]:
        """What the run keeps as probe.json."""
        return {
            "run": str(self.run),
            "seconds": round(self.seconds, 3),
            "baseline": BASELINE,
            "probes": {name: file_of(Probe(name)) for name in self.trajectories if name in list(Probe)},
            "results": [asdict(result) for result in self.results],
        }

    def __rich__(self) -> RenderableType:
        title = f"probes of {len(self.trajectories.get('none', ()))} episodes, {self.seconds:.1f} s"
        table = Table(title=title, caption="± is one standard error; looked: was shown an image of a tool")
        for name in ("data source", "probe", "n", "looked", "accuracy %", "probed %", "change"):
            table.add_column(
                name, justify="left" if name in ("data source", "probe") else "right", no_wrap=name != "data source"
            )
        for result in self.results:
            table.add_row(
                Text(result.data_source),
                result.probe,
                str(result.n),
                f"{100 * result.looked / result.n:.0f}%" if result.n else "-",
                *(
                    _shown(*pair)
                    for pair in ((result.before, result.before_stderr), (result.after, result.after_stderr))
                ),
                _shown(result.change, result.change_stderr, sign="+"),
            )
        return Group(table, Text(f"run directory: {self.run}"))


def file_of(probe: Probe) -> str:
    """Where a run keeps the episodes that were played under a probe."""
    return f"probes/{probe}.parquet"


def probe_model(
    config: Config,
    probes: Sequence[Probe],
    *,
    samples: Iterable[Sample] | None = None,
    tools: Sequence[Tool | Callable[..., object]] | None = None,
    scorer: Scorer | None = None,
    script: Script | None = None,
    console: Console | None = None,
) -> ProbeReport:
    """Play the evaluation samples, then again under each probe with the same noise; a new run directory keeps all.

    A script speaks instead of the configured engine.
    """
    check_config(config)
    check_free(Path(config.runs_dir), config.run)
    limit = config.eval.samples if samples is None else None
    prepared = prepare(config, "test", samples=samples, limit=limit, tools=tools, scorer=scorer)
    return run_stoppable(_probe_prepared(prepared, probes, script, console_or_stderr(console)))


async def _probe_prepared(
    prepared: Prepared, probes: Sequence[Probe], script: Script | None, console: Console
) -> ProbeReport:
    await check_before_run(prepared, say=printer(console))
    with new_run(prepared.config, "probe", console) as run:
        run.show_plan(prepared, plan_text(prepared))
        start = time.perf_counter()
        played = await _play(run, prepared, probes, script)
        results = [
            compare(source, probe, played["none"], played[probe])
            for source in sorted({entry.sample.data_source for entry in played["none"]})
            for probe in probes
        ]
        compared = [entry for entry in results if entry is not None]
        report = ProbeReport(run.dir.path, time.perf_counter() - start, tuple(compared), played)
        run.dir.write_json(FILE, report.as_json())
        return report


async def _play(
    run: Run, prepared: Prepared, probes: Sequence[Probe], script: Script | None
) -> dict[str, list[Trajectory]]:
    played: dict[str, list[Trajectory]] = {"none": []}
    drawn = evaluation_sampling(prepared.config)
    async with open_context(prepared, script, sampling=drawn, say=run.note) as context:
        await play_all(prepared, context, played["none"], lambda trajectory: None)
        await run.recorder.record(BASELINE, played["none"])
        donors = Donors.of(played["none"])
        if not donors.images:
            run.note("no episode was shown an image of a tool: there is nothing that a probe could change")
        for probe in probes:
            toolbox = copy.copy(context.toolbox)
            toolbox.show = probed(probe, donors)
            again = played[probe] = []
            await play_all(prepared, replace(context, toolbox=toolbox), again, lambda trajectory: None)
            for episode in again:
                episode.artifacts[PROBED] = {"probe": probe.value, "images": len(list(tool_reply_images(episode)))}
            await run.recorder.record(file_of(probe), again)
            run.note(f"probe {probe}: {_accuracy(again)} right, {_accuracy(played['none'])} without it")
    return played


def compare(source: str, probe: Probe, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> ProbeResult | None:
    """What a probe did to one data source; None when no pair of episodes was scored."""
    spoilt = {(clean.sample.id, clean.sibling): clean for clean in after if clean.right is not None}
    pairs = [
        (clean, spoilt[clean.sample.id, clean.sibling])
        for clean in before
        if clean.sample.data_source == source and clean.right is not None and (clean.sample.id, clean.sibling) in spoilt
    ]
    if not pairs:
        return None
    first, second = (share((pair[side].sample.id, bool(pair[side].right)) for pair in pairs) for side in (0, 1))
    assert first is not None and second is not None
    return ProbeResult(
        source,
        probe.value,
        n=len(pairs),
        samples=first.samples,
        looked=sum(any(True for _ in tool_reply_images(clean)) for clean, _ in pairs),
        before=first.value,
        before_stderr=first.stderr,
        after=second.value,
        after_stderr=second.stderr,
        change=second.value - first.value,
        change_stderr=clustered_error(
            (clean.sample.id, bool(probed.right) - bool(clean.right)) for clean, probed in pairs
        ),
        answers_changed=sum(_said(clean) != _said(probed) for clean, probed in pairs) / len(pairs),
    )


def _said(trajectory: Trajectory) -> str:
    return trajectory.answers[-1].visible.strip() if trajectory.answers else ""


def _accuracy(trajectories: Iterable[Trajectory]) -> Share | str:
    accuracy = share(
        (trajectory.sample.id, trajectory.right) for trajectory in trajectories if trajectory.right is not None
    )
    return "nothing" if accuracy is None else accuracy


def _shown(value: float, stderr: float | None, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}" + ("" if stderr is None else f" ± {100 * stderr:.1f}")
