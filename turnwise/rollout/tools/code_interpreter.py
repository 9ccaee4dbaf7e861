"""The `code_interpreter` tool: verl's name for `python`."""

from turnwise.rollout.tools.python import PythonTool

code_interpreter = PythonTool("code_interpreter")
