"""A learner whose weights, gradients and moments several processes share (FSDP2): `learner.processes`."""
