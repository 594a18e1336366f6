"""What the settings say about themselves: the catalogue, and the way of secrets to a child process."""

from __future__ import annotations

from settings.catalogue import catalogue, field_at
from settings.loader import effective_values, load_settings
from settings.schema import Settings
from settings.transfer import pack_settings, unpack_settings


def test_every_key_has_a_type_a_default_and_a_meaning():
    keys = catalogue()
    assert len(keys) > 60
    assert [key.dotted for key in keys if not (key.allowed and key.default and key.meaning)] == []
    assert len({key.dotted for key in keys}) == len(keys)


def test_every_effective_key_is_in_the_catalogue(tmp_path):
    settings = load_settings(None, {"TOKENLINE_STATE_DIR": str(tmp_path)}).settings
    assert [key for key, _, _ in effective_values(settings) if field_at(key) is None] == []


def test_bounds_are_told_in_words():
    told = {key.dotted: key.allowed for key in catalogue()}
    assert told["server.port"] == "a whole number from 1 to 65535"
    assert told["model.kv_cache_ratio"] == "a number above 0 and at most 1"
    assert told["engine.device"] == 'one of "auto", "cpu", "cuda", "simulated"'
    assert told["engine.max_model_len"] == "a whole number at least 8"


def test_settings_survive_the_way_to_a_child_with_their_secrets(tmp_path):
    environ = {
        "TOKENLINE_STATE_DIR": str(tmp_path),
        "TOKENLINE_SERVER__API_KEY": "sk-1",
        "TOKENLINE_UPSTREAMS__0__NAME": "a",
        "TOKENLINE_UPSTREAMS__0__URL": "http://h",
    }
    settings = load_settings(None, environ).settings
    packed = pack_settings(settings)
    assert b"\n" not in packed
    unpacked = unpack_settings(packed)
    assert isinstance(unpacked, Settings)
    assert unpacked == settings
    assert "sk-1" not in repr(unpacked)
