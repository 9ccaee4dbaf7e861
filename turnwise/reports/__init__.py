"""What is told of a run before, during and after it: the plan, checks, metrics, reports, replay, rescore and probe."""
