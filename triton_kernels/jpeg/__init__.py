"""A batched decoder of baseline JPEG files, bit-exact to libjpeg-turbo.

`layout` describes the tables of a batch, `entropy` leads from the bytes of the scans to coefficients, `idct` and
`color` from there to pixels. Each stage has a file, with its algorithm.
"""
