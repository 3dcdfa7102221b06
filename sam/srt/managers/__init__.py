"""Scheduler-side session and hint management."""
