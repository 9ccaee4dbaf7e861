"""Tool-call formats, one file each, as `chat/tool_format.py` asks; the file name is the value of `chat.tool_format`."""
