"""Several engines that serve one model: replicas, and engines that split prompts and answers."""
