"""Ollama's API, so that its clients work: chats, texts, lists of models."""
