"""Hint ingress and inspection routes in the server process."""
