"""Metrics of the overlay."""
