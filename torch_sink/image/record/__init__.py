"""What a call of torchvision, Pillow or timm on a handle becomes: a recorded operation, or stock code."""
