"""What every room may use: the environment's variables, log lines, closing. Nothing here knows the verbs."""
