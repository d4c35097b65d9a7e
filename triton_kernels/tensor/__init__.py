"""The arithmetic of torch's kernels for tensors, of bytes and of float32."""
