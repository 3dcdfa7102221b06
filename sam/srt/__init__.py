"""Adapters between `sam.core` and SGLang; paths mirror `sglang.srt`."""
