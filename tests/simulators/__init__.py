"""What stands in for a GPU where there is none."""
