"""Configuration from the environment: names, types, bounds, and errors that name the cause."""

import pytest

from sam.config import ConfigError, SamConfig, load_config


def test_defaults_without_environment():
    assert load_config({}) == SamConfig()
    assert load_config({"PATH": "/bin", "SAMBA": "1", "SAM_UNKNOWN": "x"}) == SamConfig()


def test_values_are_read_by_name_and_type():
    config = load_config(
        {
            "SAM_MAX_SESSIONS": "12",
            "SAM_SESSION_IDLE_TIMEOUT_S": "1.5",
            "SAM_PREFETCH_POOL_SHARE": "0.25",
            "SAM_RAISE_ON_ERROR": "true",
        }
    )
    assert config.max_sessions == 12 and config.session_idle_timeout_s == 1.5
    assert config.prefetch_pool_share == 0.25 and config.raise_on_error is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SAM_MAX_SESSIONS", "many"),
        ("SAM_MAX_SESSIONS", "1.5"),
        ("SAM_MAX_SESSIONS", ""),
        ("SAM_MAX_SESSIONS", "-1"),
        ("SAM_PREFETCH_LEASE_S", "-0.5"),
        ("SAM_PREFETCH_LEASE_S", "nan"),
        ("SAM_RAISE_ON_ERROR", "maybe"),
    ],
)
def test_an_unusable_value_names_its_variable(name, value):
    with pytest.raises(ConfigError, match=name):
        load_config({name: value})


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("SAM_MAX_HINT_RESULTS", "7")
    assert load_config().max_hint_results == 7


def test_session_limits_carry_over():
    config = SamConfig(max_sessions=9, max_sessions_per_tenant=4, session_idle_timeout_s=2.0)
    limits = config.session_limits()
    assert (limits.max_sessions, limits.max_per_tenant, limits.max_named) == (9, 4, 9)
    assert limits.idle_timeout_s == 2.0
