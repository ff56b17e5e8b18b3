"""The one kind of error that is meant for users."""

import re


class RiverError(Exception):
    """Something the user can put right: a file, a key, a value or an option.

    The message is one sentence or two that name what is wrong, where, and what to do about it.
    The command line prints it as a single line and exits with status 2; anything else that escapes
    is a bug of ours and keeps its traceback.
    """

    def __str__(self):
        """The message in one line; where a file's content has made it endless, its beginning and end.

        Without control characters: a name in a file, or a server's answer, must not steer the terminal.
        """
        message = re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", super().__str__())
        return message if len(message) <= 1000 else f"{message[:600]} ... {message[-300:]}"
