"""The device code. Knows torch and triton, and nothing of the rest of torch_sink."""
