"""Built-in tools, one file each; the file name is the tool's name in `rollout.tools`."""
