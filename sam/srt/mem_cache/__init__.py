"""Session-aware cache backend: ownership tags, tree core, tier commands."""
