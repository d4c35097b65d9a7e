"""What becomes of samples whose files cannot be opened or decoded; knows torch's loaders, but no image library."""
