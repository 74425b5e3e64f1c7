"""The entry point that vLLM calls in each of its processes."""


def register() -> None:
    """Nothing to register yet."""
