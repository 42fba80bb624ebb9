"""What goes wrong in a way that the user can put right."""


class UsageError(Exception):
    """An argument that cannot be honoured; its message is one line."""
