"""The `bash` tool: runs a command in the episode's repository."""

from turnwise.rollout.workspaces import WorkspaceTool

bash = WorkspaceTool("bash", "bash")
