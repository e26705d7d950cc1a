# The data engine of the byte stream.
