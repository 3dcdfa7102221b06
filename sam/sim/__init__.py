"""Replay of agent traces through `sam.core`, without a server.

Owns: traces, schedules, simulated tiers, clairvoyant limits and their report. Must never
decide what is evicted where a policy of `sam.core` does, and never import the server side.
"""
