"""The options of a switched loop's connections."""

from rdmanet.loop.settings import Settings


def test_the_options_are_those_of_the_connection_before():
    settings = Settings()
    options = settings.config("its door says so")
    assert settings.config("its door says so") is options
    assert settings.config("another reason").reason == "another reason"
    assert options.reason == "its door says so"


def test_what_the_environment_requires_is_asked_each_time(monkeypatch):
    settings = Settings()
    assert settings.config("its door says so").beside_tcp
    monkeypatch.setenv("RDMANET_REQUIRE", "no-tcp")
    assert not settings.config("its door says so").beside_tcp
    monkeypatch.delenv("RDMANET_REQUIRE")
    assert settings.config("its door says so").beside_tcp
