"""Code that several packages (gateway, engine_core, worker, tools) use, but no messages."""
