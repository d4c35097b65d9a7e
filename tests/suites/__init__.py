"""Runs the test-suites of torchvision, Pillow, PyTorch and torchdata, stock and with torch_sink, test by test."""
