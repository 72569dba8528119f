"""The images of requests: their content, and the rows that the worker has encoded."""
