"""The options of a connection, which are mostly those of the one before."""

import pytest

from rdmanet.stream.options import StreamConfig, config_of

TIMES = (None, None, None)


def test_the_very_same_options_give_the_same_object():
    seconds = float("1.5")
    given = (4096, 4, 4096, seconds, None, None, True)
    assert config_of(*given) is config_of(*given)
    assert vars(config_of(*given)) == vars(StreamConfig(4096, 4, 4096, seconds, None, keepalive=True))


def test_equal_options_of_other_types_are_looked_at():
    assert config_of(4096, 4, 4096, *TIMES, None).slot_bytes == 4096
    with pytest.raises(TypeError, match="4096.0 is not a whole number"):
        config_of(4096.0, 4, 4096, *TIMES, None)


def test_a_list_may_change_between_two_connections():
    keepalive = [60.0, 10.0, 6]
    assert config_of(4096, 4, 4096, *TIMES, keepalive).keepalive == (60.0, 10.0, 6)
    keepalive[2] = 0
    with pytest.raises(ValueError, match="positive|more than 0"):
        config_of(4096, 4, 4096, *TIMES, keepalive)


def test_a_wrong_option_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="data_slots=0"):
            config_of(4096, 0, 4096, *TIMES, None)
