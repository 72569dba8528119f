"""A worker between its connection and its end: it loads the model and executes plans."""
