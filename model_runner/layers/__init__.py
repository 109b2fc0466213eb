"""The pieces that model families are made of."""
