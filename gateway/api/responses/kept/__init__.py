"""Routes for stored responses: get, stream, cancel, delete, list input items."""
