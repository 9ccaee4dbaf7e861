"""Tasks, one file each: prompt, rows, tools, interaction, scorer; the file name is the value of `task`."""
