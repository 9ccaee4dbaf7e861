"""`turnwise train --dry-run`: plan, who is on which node, memory and an estimate of the time; nothing is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnwise.checks.start import check_before_run
from turnwise.cluster.opening import placing
from turnwise.config import Config
from turnwise.engines.memory_plan import cpu_memory, memory_here
from turnwise.environment import uses
from turnwise.errors import ConfigError
from turnwise.plan_text import plan_text
from turnwise.storage.status import read_status
from turnwise.trainer.forecast import Forecast, forecast, measured_rates, recorded_rates
from turnwise.trainer.preparing import prepare_training
from turnwise.trainer.resuming import existing_run
from turnwise.training.optimise import beside_policy


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a training would be."""

    plan: str
    memory: tuple[str, ...]
    """Of the CPU, where it computes; a GPU's is in the plan."""
    nodes: tuple[str, ...]
    """Of a cluster: what each would hold."""
    forecast: Forecast
    as_json: dict[str, Any]

    def text(self) -> str:
        """The whole, as it is printed."""
        parts = (("nodes", self.nodes), ("memory", self.memory), ("estimate", tuple(self.forecast.lines())))
        lines = [f"{'' if number else name:13}{line}" for name, said in parts for number, line in enumerate(said)]
        return self.plan + "\n".join(lines) + "\nnothing was written\n"


async def dry_run(config: Config, say: Callable[[str], None]) -> DryRun:
    """Everything that `train` does before its first step, and a part of one where no run was recorded."""
    prepared, heldout, _ = prepare_training(config, None, None, tools=None, scorer=None, interaction=None)
    placed = await placing(config, training=True)
    if placed is not None and (lacking := placed.short or placed.busy) is not None:  # what is tried below would wait
        for line in placed.nodes:
            say(line)
        raise ConfigError(f"--dry-run: the cluster has no room now: {lacking}")
    await check_before_run(prepared, heldout, say=say)
    plan, nodes = plan_text(prepared, training=True), () if placed is None else tuple(placed.nodes)
    run = existing_run(config, "train")
    status = None if run is None else read_status(run)
    rates = recorded_rates(config, len(heldout.samples), plan)
    if rates is None and config.engine.servers:
        raise ConfigError(
            "--dry-run: no run of the same work was recorded, and measuring a part of a step would give the servers of "
            "engine.servers other weights; `turnwise check` prints the plan without an estimate"
        )
    if rates is None:
        say("no run of the same work was recorded: a part of a step is played and learnt from now")
        rates = await measured_rates(prepared, lambda text: None)
    found = forecast(config, len(heldout.samples), rates, done=0 if status is None else status.step)
    gpu, memory = memory_here(config, beside_policy(config)), tuple(cpu_memory(config, beside_policy(config)))
    values = {
        "profile": config.profile,
        "plan": plan.splitlines(),
        "environment": [str(use) for use in uses(config)],
        "memory": {"gpu": None if gpu is None else gpu.as_json(), "cpu": list(memory)},
        "nodes": list(nodes),
        "estimate": found.as_json(),
    }
    return DryRun(plan, memory, nodes, found, values)
