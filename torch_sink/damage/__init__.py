"""Skips, replaces or raises samples whose files cannot be opened or decoded; knows loaders, but no image library."""
