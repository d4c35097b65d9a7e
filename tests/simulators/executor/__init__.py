"""Runs compiled kernels without a device: `README.md` says what that proves."""
