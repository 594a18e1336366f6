"""Several workers on one port, and HTTPS: the same gateway to whoever comes."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from line_rig import line


def test_workers_share_the_port_a_keys_limits_and_their_totals_are_one(tmp_path: Path) -> None:
    environ = {"TOKENLINE_SERVER__WORKERS": "2", "TOKENLINE_SIMULATED__FORWARD_MS": "1"}
    with line(tmp_path, "--device", "simulated", **environ) as up:
        body = {"model": up.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        # A connection of its own each time: the kernel deals connections out to the workers.
        client = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=30, trust_env=False)

        def ask(_: int, key: str = up.key) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return client.post(up.base_url + "/chat/completions", headers=headers, json=body).status_code

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(ask, range(40))) == {200}
        up.until_metric(40, "tokenline_requests_total", outcome="ok")
        admin = {"x-api-key": (tmp_path / "state" / "admin-key").read_text().strip()}
        asked = {"alias": "app", "limits": {"requests_per_minute": 15}}
        made = httpx.post(up.ops_url + "/admin/v1/keys", json=asked, headers=admin).json()
        with ThreadPoolExecutor(4) as pool:
            limited = list(pool.map(ask, range(40), [made["secret"]] * 40))
        assert (limited.count(200), limited.count(429)) == (15, 25)
        up.until_metric(25, "tokenline_rejections_total", reason="rate_limit")
        ticks = [up.metric("tokenline_event_loop_lag_seconds_count", worker=str(number)) for number in range(2)]
        assert min(ticks) > 0
        before = up.metric("tokenline_requests_total", outcome="ok")
        counted = up.counted()
        up.child("worker:1").kill()
        assert fallen(counted, up.counted()) == []
        statuses = []
        deadline = time.monotonic() + 20
        while len(statuses) < 30 and time.monotonic() < deadline:
            try:
                statuses.append(ask(0))
            except httpx.HTTPError:
                continue  # a connection that the dead worker had in its queue
        assert set(statuses) == {200}
        up.until_metric(before + 30, "tokenline_requests_total", outcome="ok")
        # Its successor counts from nothing, the observer goes on from what there was.
        up.until_metric(ticks[1] + 1, "tokenline_event_loop_lag_seconds_count", worker="1")
        assert fallen(counted, up.counted()) == []


def fallen(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """What is less than it was, or gone."""
    assert len(before) > 100
    return [name for name, value in before.items() if after.get(name, -1.0) < value]


def test_https_is_served_with_the_users_certificate(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    environ = {"TOKENLINE_SERVER__TLS_CERT": str(certificate), "TOKENLINE_SERVER__TLS_KEY": str(key)}
    with line(tmp_path, "--device", "simulated", **environ) as up:
        assert up.base_url.startswith("https://")
        answer = httpx.post(
            up.base_url + "/chat/completions",
            headers={"authorization": f"Bearer {up.key}"},
            json={"model": up.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
            verify=str(certificate),
        )
        assert answer.status_code == 200
        seen = up.why(answer.headers["x-request-id"])
        assert abs(sum(seen["stages"].values()) + seen["unaccounted_ms"] - seen["e2e_ms"]) < 0.01
