"""One training step: forward pass, loss, backward pass and optimizer update, in any precision."""
