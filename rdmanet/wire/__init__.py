"""What the two sides of a connection tell each other beside the frames of credit.py, and its rules. All of it is pure.

* ``offers``: which memory is on offer, and what a Credit says about it
* ``placement``: which bytes may be written directly into memory that a read has named
* ``slots``: receive slots that grow and shrink
* ``remote``: where the peer's memory is
* ``qpinfo``: what queue pairs exchange in order to connect
"""
