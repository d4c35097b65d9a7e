"""Where batches wait: slots on a device, or on the host."""
