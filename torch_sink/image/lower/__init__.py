"""Recorded operations -> atoms, which stages are made of."""
