"""The Hydra config module: the root config, and what stands for the keys of other systems and earlier versions."""
