"""llama.cpp's /infill: fill in the middle, for editors."""
