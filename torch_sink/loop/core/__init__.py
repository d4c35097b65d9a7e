"""What every part of the loop uses: arguments, ranks, waits for the device."""
