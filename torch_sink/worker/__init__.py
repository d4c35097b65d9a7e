"""Data workers: how one is prepared, what it sends, and how the training process receives it."""
