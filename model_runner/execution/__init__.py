"""From a scheduled batch to sampled tokens on a device."""
