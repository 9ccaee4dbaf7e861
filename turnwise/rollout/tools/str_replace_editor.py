"""The `str_replace_editor` tool: OpenHands' name of edit."""

from turnwise.rollout.workspaces import WorkspaceTool

str_replace_editor = WorkspaceTool("str_replace_editor", "edit")
