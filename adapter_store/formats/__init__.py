"""What the bytes of an adapter mean."""
