"""What fetches batches ahead: a thread, or the consumer itself."""
