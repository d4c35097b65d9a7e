"""Image backend: torchvision code in, device batches out."""
