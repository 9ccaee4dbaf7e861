"""The `finish` tool: says that the work on the episode's repository is done."""

from turnwise.rollout.workspaces import WorkspaceTool

finish = WorkspaceTool("finish", "finish")
