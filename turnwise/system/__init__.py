"""What every room may use and knows nothing of models: files, processes, signals, retries, servers and plug-ins."""
