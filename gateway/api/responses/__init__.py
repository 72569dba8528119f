"""OpenAI's Responses API. A request is translated into a chat request."""
