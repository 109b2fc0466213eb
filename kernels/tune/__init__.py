"""`python -m kernels.tune`: measures tile sizes on this machine's GPU and writes them to the tiles
folder. Nothing of the service imports it."""
