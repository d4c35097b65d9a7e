"""Pillow's arithmetic: what makes its bits."""
