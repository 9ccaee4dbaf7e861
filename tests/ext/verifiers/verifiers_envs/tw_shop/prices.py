"""The tool server of the shop."""

import verifiers.v1 as vf


class PricesToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str) -> str:
        """What an item costs."""
        return {"hat": "12"}.get(item, "unknown")


if __name__ == "__main__":
    PricesToolset.run()
