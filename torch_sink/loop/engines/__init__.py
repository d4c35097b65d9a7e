"""The modes in which steps run: eager, compiled, or captured as CUDA graphs."""
