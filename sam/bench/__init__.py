"""Measurements of the overlay. Owns no behaviour of the server."""
