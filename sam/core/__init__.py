"""Pure decisions of sam: hint schema, session table, retention order, events.

Owns every rule that the live server, the simulator and the reference model share.
Must never import sglang, torch, `sam.srt` or `sam.platform`, and never read a clock:
time stamps and ids come in as arguments.
"""
