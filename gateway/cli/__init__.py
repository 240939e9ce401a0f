"""The command `grid`. `app.py` puts it together; each other file holds commands of one kind, or
what they share.

A command is a few calls of the client or of `gateway.launch`, and how to show them. What is heavy (httpx,
pydantic, psutil) is imported by the command that needs it: a shell runs `grid` at every press of TAB.
"""


def main() -> None:
    from gateway.cli.app import app

    app(prog_name="grid")
