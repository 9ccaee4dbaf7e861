"""What can be found wrong before a model is loaded: `check` tells it, `eval` and `train` refuse it."""
