"""The device and this machine, before any model is known: memory, drivers, copies, measurements."""
