"""The engine room, the only one that knows model code: policy models, samplers that write, learners that train."""
