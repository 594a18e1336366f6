"""What the gateway knows of the client's side: its clock, its connection, and its own loop's lateness."""

import asyncio
import socket

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.client_clock import TrustedProxies, request_start_ns
from gateway.client_socket import NOTSENT_LOWAT_BYTES
from gateway.connection import WRITE_LIMIT_BYTES, Connection
from gateway.head_join import HeadJoin
from gateway.lag import LoopLag
from tracing.clock import FakeClock
from tracing.ledger import Ledger

INSTANT_NS = 1_796_055_379_123_456_000


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"t=1796055379.123456", INSTANT_NS),
        (b"1796055379.123456", INSTANT_NS),
        (b"t=1796055379123.456", INSTANT_NS),
        (b"t=1796055379123456", INSTANT_NS),
        (b"t=soon", None),
        (b"", None),
        (b"t=nan", None),
        (b"t=inf", None),
        (b"t=-5", None),
        (b"t=1e30", None),
    ],
)
def test_request_start_is_read_in_seconds_milliseconds_and_microseconds(header: bytes, expected: int | None) -> None:
    found = request_start_ns(header)
    assert (found is None) == (expected is None)
    assert expected is None or abs((found or 0) - expected) < 1000


@pytest.mark.parametrize(
    ("client", "trusted"),
    [
        (("10.1.2.3", 1), True),
        (("192.168.0.7", 1), True),
        (("192.168.0.8", 1), False),
        (("x", 1), False),
        (None, False),
    ],
)
def test_only_a_trusted_proxy_is_believed(client: tuple[str, int] | None, trusted: bool) -> None:
    assert TrustedProxies(["10.0.0.0/8", "192.168.0.7"]).trust(client) == trusted
    assert not TrustedProxies([]).trust(client)


class Transport(asyncio.Transport):
    """Holds as many bytes as the test says, and remembers its limits."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.limits: tuple[int | None, int | None] | None = None

    def get_write_buffer_size(self) -> int:
        return self.held

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = high, low


def new_ledger() -> Ledger:
    return Ledger("r", "t" * 32, "s" * 16, 1, 1)


class Line:
    """A connection over a transport that holds what it is told to."""

    def __init__(self) -> None:
        self.transport, self.clock = Transport(), FakeClock()
        self.flow = FlowControl(self.transport)
        self.connection = Connection(HeadJoin(self.transport), self.flow)
        self.connection.listen()

    def begin(self) -> Ledger:
        ledger = new_ledger()
        self.connection.begin(ledger, self.clock)
        return ledger

    def end(self, ledger: Ledger) -> float:
        """Ends the answer now; its back-pressure in ms."""
        ledger.finish = self.clock.mono_ns()
        self.connection.end(ledger)
        return ledger.backpressure_ns / 1e6


def test_back_pressure_is_the_time_in_which_written_bytes_were_not_taken() -> None:
    line = Line()
    assert line.transport.limits == (1, 0)
    ledger = line.begin()
    line.clock.advance_ms(10)
    for behind_ms, apart_ms in [(20, 30), (40, 50)]:
        line.connection.fell_behind()
        line.clock.advance_ms(behind_ms)
        line.connection.caught_up()
        line.clock.advance_ms(apart_ms)
    line.connection.fell_behind()
    line.clock.advance_ms(5)
    assert line.end(ledger) == 20 + 40 + 5
    line.clock.advance_ms(1000)
    line.connection.caught_up()
    assert ledger.backpressure_ns == 65e6


def test_what_is_unsent_at_the_last_byte_is_charged_up_to_it() -> None:
    line = Line()
    ledger = line.begin()
    line.connection.fell_behind()
    ledger.finish = line.clock.advance_ms(7)
    line.clock.advance_ms(500)
    line.connection.caught_up()
    line.connection.end(ledger)
    assert ledger.backpressure_ns == 7e6


def test_what_is_unsent_when_the_next_answer_begins_is_charged_to_the_earlier_one_up_to_its_end() -> None:
    line = Line()
    earlier = line.begin()
    line.connection.fell_behind()
    earlier.finish = line.clock.advance_ms(7)
    line.clock.advance_ms(500)
    later = line.begin()
    line.clock.advance_ms(3)
    line.connection.caught_up()
    line.connection.end(earlier)
    assert (earlier.backpressure_ns, line.end(later)) == (7e6, 3)


def test_an_answer_is_not_charged_with_the_time_before_it() -> None:
    line = Line()
    assert line.end(line.begin()) == 0
    line.connection.fell_behind()
    line.clock.advance_ms(1000)
    ledger = line.begin()
    line.clock.advance_ms(3)
    line.connection.caught_up()
    line.clock.advance_ms(1000)
    assert line.end(ledger) == 3


async def test_writing_pauses_over_the_limit_and_goes_on_at_a_quarter() -> None:
    line = Line()
    ledger = line.begin()
    line.connection.fell_behind()
    line.transport.held = WRITE_LIMIT_BYTES
    line.connection.bound()
    assert not line.flow.write_paused
    line.transport.held += 1
    line.connection.bound()
    assert line.flow.write_paused
    assert line.transport.limits == (WRITE_LIMIT_BYTES, WRITE_LIMIT_BYTES // 4)
    line.clock.advance_ms(9)
    line.connection.caught_up()
    assert not line.flow.write_paused
    assert line.transport.limits == (1, 0)
    assert line.end(ledger) == 9


async def test_a_real_connection_tells_its_round_trip_and_what_is_unsent() -> None:
    made: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    transports: list[asyncio.Transport] = []

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)  # type: ignore[arg-type]
            joined = HeadJoin(transport)  # type: ignore[arg-type]
            made.set_result(Connection(joined, FlowControl(joined)))  # type: ignore[arg-type]

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, server.sockets[0].getsockname())
    connection = await made
    ledger = new_ledger()
    connection.end(ledger)
    assert 0 < ledger.client_rtt_ns < 1e9
    assert ledger.unsent_bytes == 0
    transports[0].write(b"x" * 400_000)
    connection.end(ledger)
    assert ledger.unsent_bytes > 300_000
    # What the kernel can't send is left with us, where it is seen.
    assert transports[0].get_write_buffer_size() > 400_000 - 200_000 - NOTSENT_LOWAT_BYTES
    transports[0].abort()
    client.close()
    server.close()


async def test_lag_is_how_overdue_the_tick_is() -> None:
    clock = FakeClock()
    lag = LoopLag(clock)
    assert lag.overdue_ns(clock.mono_ns()) == 0
    lag.start()
    assert lag.overdue_ns(clock.advance_ms(4)) == 0
    assert lag.overdue_ns(clock.advance_ms(11)) == 10_000_000
    while not (samples := lag.drain()):
        await asyncio.sleep(0.005)
    assert max(samples) >= 10_000_000
    assert lag.drain() == []
    lag.stop()


async def test_a_late_tick_that_ran_just_before_is_the_lag_of_who_runs_after_it() -> None:
    clock = FakeClock()
    lag = LoopLag(clock)
    lag.start()
    clock.advance_ms(305)
    while not lag._stall_ns:
        await asyncio.sleep(0.005)
    assert lag.overdue_ns(clock.advance_ms(1)) == 300_000_000
    assert lag.overdue_ns(clock.advance_ms(4.5)) < 1_000_000
    lag.stop()
