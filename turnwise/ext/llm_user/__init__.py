"""A simulated user whose words are a language model's, over an OpenAI-compatible endpoint."""
