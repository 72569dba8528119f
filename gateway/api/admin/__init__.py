"""Routes for operators: health, version, metrics, models."""
