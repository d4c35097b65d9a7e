"""Sources and recorded calls -> pixels: in stock code on the CPU, or as launches of kernels on a device."""
