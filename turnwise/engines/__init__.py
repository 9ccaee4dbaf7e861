"""The only room that knows model code: samplers that write tokens and, beside them, the decoder they run."""
