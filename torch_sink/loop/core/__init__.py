"""What every part of the loop uses: checks of arguments, batches, ranks, history, and watches for host syncs."""
