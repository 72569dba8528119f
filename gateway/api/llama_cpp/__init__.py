"""llama.cpp's own routes: /completion, /apply-template and /props."""
