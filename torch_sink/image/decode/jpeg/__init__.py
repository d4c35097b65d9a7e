"""JPEG files for the kernels that decode them."""
