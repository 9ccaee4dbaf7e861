"""`cluster=ray`: samplers, learner, scorers and sandboxes as actors on the nodes of a Ray cluster."""
