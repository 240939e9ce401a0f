"""Zerogrid: a self-hosted compute grid for AI pipelines. `Grid` and `AsyncGrid` are the client."""
