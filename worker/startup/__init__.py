"""Start-up of a worker: from its config to a loaded model, reserved memory and a model card."""
