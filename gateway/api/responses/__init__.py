"""OpenAI's Responses API: items in, typed events out, over the same stream of events as a chat."""
