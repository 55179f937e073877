"""What a run says about itself: events, waits, logs, metrics, the live display, the summary and the report.

No module here imports torch, and none blocks the event loop for long: a log line costs one small write to its file, and
a thread of its own writes to the terminal.
"""
