"""A batched decoder of baseline JPEG files, bit-exact to libjpeg-turbo."""
