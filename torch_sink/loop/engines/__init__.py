"""How steps run: eagerly, compiled, or as captured graphs."""
