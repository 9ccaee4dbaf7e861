"""Who may reach a server: nobody from outside without a token that can be sent."""

import pytest

from turnwise.errors import ConfigError
from turnwise.serving import check_binding, is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "192.168.0.3", "example.org", "", "127.0.0.1.example"])
def test_an_address_that_others_reach_needs_a_token(host):
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="a board on .* shows runs .*give it a token"):
        check_binding(host, None, "a board", "shows runs")
    assert check_binding(host, "secret", "a board", "shows runs") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_none(host):
    assert is_loopback(host)
    assert check_binding(host, None, "a board", "shows runs") is None


@pytest.mark.parametrize("token", ["", "with space", "line\n", "ümlaut"])
def test_a_token_that_cannot_be_sent_is_refused(token):
    with pytest.raises(ConfigError, match="printable ASCII"):
        check_binding("127.0.0.1", token, "a board", "shows runs")
