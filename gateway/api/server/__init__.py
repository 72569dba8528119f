"""Routes about the server itself: its health, its models and adapters, its operators, its page."""
