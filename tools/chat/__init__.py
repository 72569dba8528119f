"""A conversation with a server: its history and its streamed answers, and how they are printed."""
