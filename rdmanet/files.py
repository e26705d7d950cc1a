"""Another name of ``rdmanet.streams.files``."""

from rdmanet.streams.files import sendfile as sendfile
