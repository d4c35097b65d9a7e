"""What the layers share: nested batches, random state."""
