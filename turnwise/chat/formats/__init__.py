"""Tool-call formats, one file each; the file name is the value of `chat.tool_format`."""
