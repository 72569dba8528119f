"""From a config to a worker that is ready: device, memory, model card."""
