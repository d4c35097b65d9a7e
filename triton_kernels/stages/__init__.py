"""The kernels that transform images: a prologue, the stages, and what some of these need to know of a whole image."""
