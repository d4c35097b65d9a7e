"""Where batches come from: loaders of every kind, opened at a position."""
