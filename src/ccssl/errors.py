"""What went wrong because of what was asked for, not because of a mistake in the program."""


class InputError(ValueError):
    """A file, an argument or a setting is not what it must be; the message is a sentence for the user.

    The command line shows the sentence alone and ends with exit code 2. Every other exception is a mistake in
    the program and keeps its traceback.
    """
