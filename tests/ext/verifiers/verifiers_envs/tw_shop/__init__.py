"""A tool: a server of its own for each rollout, which looks prices up."""

import verifiers.v1 as vf

from tw_shop.prices import PricesToolset


class ShopTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[vf.TaskData, vf.State, ShopTaskConfig]):
    @classmethod
    def toolsets(cls, config: ShopTaskConfig) -> list[vf.Toolset]:
        return [PricesToolset(config.tools)]

    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        return float("12" in trace.last_reply)


class ShopConfig(vf.TasksetConfig):
    task: ShopTaskConfig = ShopTaskConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    def load(self) -> list[ShopTask]:
        return [ShopTask(vf.TaskData(prompt=f"What does a hat cost? ({n})"), self.config.task) for n in range(4)]


__all__ = ["ShopTaskset"]
