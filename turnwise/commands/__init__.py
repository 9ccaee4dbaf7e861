"""The smaller verbs of the command line, one file each: HELP, `add_arguments` and `run`; light until they run."""
