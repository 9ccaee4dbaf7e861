"""Sample -> Trajectory: the conversation, the episode, the group and the collector that runs many of them."""
