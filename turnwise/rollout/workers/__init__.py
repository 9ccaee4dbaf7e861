"""Episode workers: processes that each play a share of a run's episodes, while the sampler stays where it is."""
