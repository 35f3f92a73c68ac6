"""``python -m lightning_topk bench``: times training steps with DDP, its hooks and ours, on the user's own machines."""
