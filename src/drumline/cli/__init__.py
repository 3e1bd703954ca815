"""The command line: one short module a command; each parses, calls and prints. Nothing imports this room.

In: arguments. Out: a table or one JSON document on stdout, logs and errors on stderr, an exit code (see `app`).
"""

__all__: list[str] = []
