"""What a run says about itself: events, waits, logs, metrics, the live display and the summary.

Nothing here imports torch, and nothing here blocks the event loop for long: files are appended to
with one small write per line, terminals are written to by a thread of their own.
"""
