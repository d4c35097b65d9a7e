"""Encoded bytes -> pixels: providers, and the host's half of the JPEG decoder in Triton."""
