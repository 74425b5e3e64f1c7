"""Medusa speculative decoding for vLLM: trees of guesses, checked in one pass, the same tokens sooner."""

__version__ = "0.1.0"
