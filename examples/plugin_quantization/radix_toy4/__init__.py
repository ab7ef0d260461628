"""toy4: 4-bit weights with block scales, a format for the Radix runtime."""
