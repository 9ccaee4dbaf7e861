"""MCP servers as tools: one entry of a tools file starts or joins a server, and its tools join the run."""
