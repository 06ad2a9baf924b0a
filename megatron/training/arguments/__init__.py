"""Command line -> configuration, checked as a whole before anything starts."""
