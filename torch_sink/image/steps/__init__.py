"""Transforms of torchvision as one step each: they draw, and record what they have drawn on a draft."""
