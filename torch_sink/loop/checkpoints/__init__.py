"""Checkpoints: their files, and what they hold."""
