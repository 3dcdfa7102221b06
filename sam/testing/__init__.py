"""Helpers for tests and measurements: models, servers. Must never be imported by the server."""
