"""The OpenAPI document, made from the structs that check requests."""
