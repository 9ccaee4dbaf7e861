"""The `code_interpreter` tool: verl's name for `python`."""

from turnwise.ext.sandbox.tools.python import PythonTool

code_interpreter = PythonTool("code_interpreter")
