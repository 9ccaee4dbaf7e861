"""The run directory: written atomically, read by everything that looks at a run."""
