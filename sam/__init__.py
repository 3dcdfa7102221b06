"""sam: an agent-session-aware KV cache for SGLang (overlay package)."""

__version__ = "0.5.23.post1.dev0"
