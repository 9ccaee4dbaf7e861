"""The `execute_bash` tool: OpenHands' name of bash."""

from turnwise.rollout.workspaces import WorkspaceTool

execute_bash = WorkspaceTool("execute_bash", "bash")
