"""What user code holds instead of pixels."""
