"""The model's side for code written against an SDK: OpenAI and Anthropic over HTTP, recorded token by token."""
