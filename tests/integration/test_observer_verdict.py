"""Verdicts of a running observer: by request, in lists and by window, and with what it knew before a restart."""

from __future__ import annotations

from judging import delayed
from observer_rig import ADMIN_KEY, ObserverProcess, Start, WorkerLink, here

from tracing.ledger import Closed


def feed(observer: ObserverProcess, requests: int) -> None:
    """Ordinary requests, and a slow one that is `req_1000`."""
    link = WorkerLink(observer.settings.intake_socket)
    link.hello()
    for number in range(requests):
        link.send(Closed(here(number)))
    link.send(Closed(delayed(30.5, 500, here(1000))))
    observer.find("req_1000")
    link.close()


def test_a_verdict_comes_with_the_request_in_either_language(start: Start) -> None:
    observer = start().wait_healthy()
    feed(observer, 40)
    (found,) = observer.find("req_1000")
    verdict = found["verdict"]
    assert (verdict["cause"], verdict["stage"], verdict["confidence"]) == ("engine_queue", "engine_queue", "medium")
    assert verdict["excess"][0]["share"] > 0.9
    assert found["baseline"]["requests"] == 41
    assert found["baseline"]["stages"]["engine_queue"]["p50_ms"] > 17
    assert "比平时多" in observer.find("req_1000", lang="zh")[0]["verdict"]["text"]
    assert observer.admin("/requests/req_1000", lang="de").status_code == 422


def test_the_list_and_the_window_name_the_cause(start: Start) -> None:
    observer = start().wait_healthy()
    feed(observer, 40)
    slowest = observer.admin("/slow", limit=2).json()["requests"]
    assert [one["cause"] for one in slowest] == ["engine_queue", "none"]
    assert slowest[0]["request_id"] == "req_1000"
    window = observer.admin("/window", window="5m", model="m").json()
    assert (window["requests"], window["slowest"]["requests"]) == (41, 1)
    assert window["slowest"]["request_ids"] == ["req_1000"]
    assert window["verdict"]["cause"] == "engine_queue"
    assert observer.admin("/window", window="5m", model="other").json()["requests"] == 0
    assert observer.admin("/window", window="soon").status_code == 422
    assert observer.admin("/window", key=None).status_code == 401
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    asked = observer.http.post("/admin/v1/requests", json={"ids": ["req_1000", "no-such"]}, headers=headers)
    assert asked.json()["requests"].keys() == {"req_1000"}
    assert asked.json()["requests"]["req_1000"]["stages_ms"]["engine_queue"] > 500
    too_many = observer.http.post("/admin/v1/requests", json={"ids": ["x"] * 1001}, headers=headers)
    assert too_many.status_code == 422
    live = observer.admin("/live", window="5m", model="m").json()
    assert (live["requests"], live["load_tests_left_out"], len(live["samples"])) == (41, 0, 41)
    assert observer.admin("/live", key=None).status_code == 401


def test_what_is_usual_outlives_a_restart(start: Start) -> None:
    observer = start().wait_healthy()
    feed(observer, 40)
    assert observer.terminate() == 0
    again = start().wait_healthy()
    found = again.find("req_1000")[0]
    assert (found["baseline"]["requests"], found["verdict"]["cause"]) == (41, "engine_queue")
