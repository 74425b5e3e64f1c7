"""The one error a user of vllm-medusa can cause."""


class MedusaError(ValueError):
    """Bad input: settings, trees, heads or a host that cannot serve them.

    The message is one or two sentences that name the key, the value and the fix.

    >>> raise MedusaError.of("tree", [], "give at least one path, for example [[0]]")
    Traceback (most recent call last):
        ...
    vllm_medusa.errors.MedusaError: medusa: tree=[]: give at least one path, for example [[0]]
    """

    @classmethod
    def of(cls, key: str, value: object, fix: str) -> "MedusaError":
        """Build the message from the user's key, its value and the fix.

        A long value is shortened in its middle: a path ends with the file's name and line.
        """
        try:
            shown = repr(value)
        except (ValueError, RecursionError):  # a number of thousands of digits, a list thousands deep
            shown = f"({type(value).__name__}, too large to show)"
        if len(shown) > 100:
            shown = shown[:40] + "..." + shown[-57:]
        message = f"medusa: {key}={shown}: {fix}"
        # Names and reasons come from files of strangers: one line, and nothing that a terminal would obey.
        return cls("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
