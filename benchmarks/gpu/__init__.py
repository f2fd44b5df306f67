"""Training steps on a device: persia beside tables in the device's memory, and what copies cost it."""
