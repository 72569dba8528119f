"""Messages -> prompt text or token ids. Pure; the input is decoded JSON."""
