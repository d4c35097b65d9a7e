"""One training step: forward, loss, backward, update, in some precision."""
