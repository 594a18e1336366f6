"""Before anything starts: keys of the first start, ports, the state folder, what is printed at the end."""

from __future__ import annotations

import os
import socket

import pytest

from cli.announce import Facts, curl_line, lines_of
from cli.bootstrap import tenant_key, with_admin_key, write_key_file
from cli.errors import CliError, Exit
from cli.exclusive import check_ports, owned_state_dir
from cli.extras import check_engine_installed
from gateway.keys.store import KeyStore
from settings.loader import load_settings
from settings.paths import prepare_state_dir


def test_the_first_start_makes_keys_and_later_starts_keep_them(state):
    settings = load_settings().settings
    prepare_state_dir(settings)
    key, admin = tenant_key(settings), with_admin_key(settings).server.admin_key
    assert tenant_key(settings) == key
    assert with_admin_key(settings).server.admin_key == admin
    assert [oct((state / name).stat().st_mode & 0o777) for name in ("key", "admin-key")] == ["0o600"] * 2
    assert (state / "key").read_text() == key + "\n"


def test_a_revoked_first_key_is_replaced_and_a_lost_file_ends_nobodys_key(state):
    settings = load_settings().settings
    prepare_state_dir(settings)
    store = KeyStore(settings.keys_path)
    first = tenant_key(settings)
    store.revoke("default")
    second = tenant_key(settings)
    assert second != first
    (state / "key").unlink()
    third = tenant_key(settings)
    assert third not in (first, second)
    working = {record.alias for record in store.list() if record.revoked_ns is None}
    assert working == {"default", "default-2"}


def test_without_redis_a_gateway_starts_with_the_key_that_it_kept(state, monkeypatch, free_port):
    monkeypatch.setenv("TOKENLINE_REDIS__URL", f"redis://127.0.0.1:{free_port}/0")
    settings = load_settings().settings
    prepare_state_dir(settings)
    with pytest.raises(CliError, match=r"redis\.url") as caught:
        tenant_key(settings)
    assert caught.value.code == Exit.UNREACHABLE
    write_key_file(state / "key", "sk-tl-kept")
    assert tenant_key(settings) == "sk-tl-kept"


def test_configured_keys_win_and_no_file_is_made(state, monkeypatch):
    monkeypatch.setenv("TOKENLINE_SERVER__API_KEY", "mine")
    monkeypatch.setenv("TOKENLINE_SERVER__ADMIN_KEY", "boss")
    settings = load_settings().settings
    prepare_state_dir(settings)
    assert tenant_key(settings) == "mine"
    assert with_admin_key(settings) is settings
    assert sorted(entry.name for entry in state.iterdir()) == ["run"]


def test_a_port_in_use_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CliError, match=rf"server\.ops_port = {port}.*in use.*TOKENLINE_SERVER__OPS_PORT"):
            check_ports([("server.ops_port", "127.0.0.1", port)])
    check_ports([("server.ops_port", "127.0.0.1", port)])


def test_an_address_of_another_machine_is_named():
    with pytest.raises(CliError, match=r"server\.port = 8080: 192\.0\.2\.1:8080 can't be listened on"):
        check_ports([("server.port", "192.0.2.1", 8080)])


def test_two_instances_on_one_state_folder_are_refused_until_the_first_has_ended(state):
    settings = load_settings().settings
    prepare_state_dir(settings)
    with owned_state_dir(settings, ["gateway"]):
        with pytest.raises(CliError, match=f"process {os.getpid()}.*TOKENLINE_STATE_DIR"):  # noqa: SIM117
            with owned_state_dir(settings, ["gateway", "engine"]):
                pass
        with owned_state_dir(settings, ["engine"]):
            pass
    with owned_state_dir(settings, ["gateway"]):
        pass


def test_without_torch_the_way_out_is_told_and_the_simulated_device_does_not_need_it(state, monkeypatch):
    def find(name: str) -> object:
        return None if name == "torch" else name

    with pytest.raises(CliError, match=r"not installed: torch\..*'\.\[engine\]'.*engine.backend = \"none\""):
        check_engine_installed(load_settings().settings, find)
    monkeypatch.setenv("TOKENLINE_ENGINE__DEVICE", "simulated")
    check_engine_installed(load_settings().settings, find)


def test_a_made_key_is_printed_and_a_configured_one_is_not(monkeypatch):
    made = Facts(base_url="http://h/api", key="sk-made", model="m", ops_url="http://o")
    assert "Bearer sk-made" in curl_line(made)
    assert any("sk-made" in line for line in lines_of(made))
    configured = Facts(base_url="http://h/api", key="sk-mine", model="it's", key_is_configured=True)
    monkeypatch.setenv("TOKENLINE_API_KEY", "sk-mine")
    assert "Bearer $TOKENLINE_API_KEY" in curl_line(configured)
    assert not any("sk-mine" in line for line in lines_of(configured))
