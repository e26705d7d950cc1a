"""What the two sides tell each other, beside the frames of credit.py, and its rules. All of it is pure."""
