"""Tool-call formats, a file each, as `chat/calls/tool_format.py` asks; its name is the value of `chat.tool_format`.

Names that a file imports and does not use are the format's too, such as the tags of its thoughts.
"""
