"""Data workers: watched, guarded, and their queue of results."""
