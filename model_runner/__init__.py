"""The engine: token ids in, token ids out. Runs in a plain Python shell."""
