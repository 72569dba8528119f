"""OpenAI's API: their JSON in, their JSON out. Nothing here knows how a model works."""
