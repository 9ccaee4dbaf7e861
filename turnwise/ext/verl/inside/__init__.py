"""Our agent loops inside verl's trainer, which keeps its data, servers and weights: docs/ext/verl.md."""
