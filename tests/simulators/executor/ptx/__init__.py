"""PTX, executed on the CPU for all threads of a launch at once, in NumPy."""
