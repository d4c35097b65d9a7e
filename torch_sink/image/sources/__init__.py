"""Encoded and decoded images."""
