"""The Triton kernels. They import torch and triton, and nothing else of torch_sink."""
