"""`asyncrl doctor`: what this machine lacks for a job, and how to mend it. Checks are functions of facts."""
