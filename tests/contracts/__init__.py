"""What loops may rely on: the same tests run against the real controller and executor and against the fakes."""
