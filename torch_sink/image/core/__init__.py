"""What every part of the image backend uses: recorded calls, atoms, the fallback report."""
