"""What a configuration needs before it runs: memory, communication, time. No GPU and no weights needed."""
