"""Tool-call formats, a file each, as `chat/calls/tool_format.py` asks; its name is the value of `chat.tool_format`."""
