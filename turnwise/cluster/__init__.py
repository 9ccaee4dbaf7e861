"""The cluster room: `cluster=ray` puts samplers, learner, scorers and sandboxes into actors on the nodes of Ray."""
