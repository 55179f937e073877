"""Ways of moving weights: broadcast over a process group, a directory on disk, shared memory on one host."""
