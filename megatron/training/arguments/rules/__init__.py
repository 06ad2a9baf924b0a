"""The rules of a configuration, one small function each, a file a concern."""
