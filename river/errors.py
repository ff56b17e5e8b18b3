"""The one kind of error that is meant for users."""


class RiverError(Exception):
    """Something the user can put right: a file, a key, a value or an option.

    The message is one sentence or two that name what is wrong, where, and what to do about it.
    The command line prints it as a single line and exits with status 2; anything else that escapes
    is a bug of ours and keeps its traceback.
    """

    def __str__(self):
        """The message; where a file's content has made it endless, its beginning and end."""
        message = super().__str__()
        return message if len(message) <= 1000 else f"{message[:600]} ... {message[-300:]}"
