"""Commands to a running job: `asyncrl cell`, `asyncrl health`. The driver serves them on a socket in its run directory.

`protocol` says what can be asked and answered, `server` runs in the driver, `client` in the command. The owner of
the engines gives the server a handler (`inference/engine_commands.py`).
"""
