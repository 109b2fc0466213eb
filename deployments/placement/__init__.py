"""Which replicas serve which adapters: pure functions over plain values. Nothing here knows Ray."""
