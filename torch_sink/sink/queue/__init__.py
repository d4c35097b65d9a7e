"""Where batches wait: what makes them ready, the slots that they lie in, and what the queue saw."""
