"""What can be found wrong before a model is loaded: `check` shows it, `eval` and `train` refuse to start."""
