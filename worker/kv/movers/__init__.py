"""The ways by which bytes come from one worker's cache into another's."""
