"""Where the bytes of an adapter come from."""
