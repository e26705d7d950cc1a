"""TLS contexts with the tests' own certificates: for localhost, of the tests' authority."""

import ssl
from pathlib import Path

CERTIFICATES = Path(__file__).parents[1] / "streams" / "certificates"


def of_server(name: str = "server", **settings: object) -> ssl.SSLContext:
    """A server's, which also knows the authority of clients' certificates; `settings` are attributes of it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=CERTIFICATES / "authority.pem")
    context.load_cert_chain(CERTIFICATES / f"{name}.pem")
    for setting, value in settings.items():
        setattr(context, setting, value)
    return context


def of_client() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
