"""The `edit` tool: views and changes files of the episode's repository."""

from turnwise.rollout.workspaces import WorkspaceTool

edit = WorkspaceTool("edit", "edit")
