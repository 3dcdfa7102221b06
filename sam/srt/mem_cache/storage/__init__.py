"""Session semantics of the L3 pool: manifests, reclaim, prefetch by session."""
