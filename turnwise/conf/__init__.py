"""The Hydra config module: the root config and the defaults each task brings."""
