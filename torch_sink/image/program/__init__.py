"""Atoms -> stages -> the tables of a batch's launches."""
