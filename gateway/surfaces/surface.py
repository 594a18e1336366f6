"""A surface is an API path that clients call; a dialect is how it is spoken with one upstream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from gateway.surfaces.openai import ParsedRequest, without_timings
from gateway.surfaces.shapes import OPENAI_ERRORS, ErrorShape
from gateway.surfaces.stream import EventRelay, StreamRelay, read_timings, read_usage
from gateway.upstreams.router import Route, Target, Upstream
from protocol.errors import ApiError
from protocol.openai import decode_answer, is_present
from tracing.ledger import Ledger


class Dialect(ABC):
    """What an upstream is sent for a request, and what the client gets of its answer."""

    @abstractmethod
    def path(self, request: ParsedRequest) -> str:
        """Where the request goes, after the upstream's base URL."""

    at_root = False
    """The path is not below the upstream's /v1 but beside it."""

    def url(self, base_url: str, request: ParsedRequest) -> str:
        """The whole address."""
        return (base_url.removesuffix("/v1") if self.at_root else base_url) + self.path(request)

    @abstractmethod
    def body(self, request: ParsedRequest, model: str) -> bytes:
        """The request's body for an upstream that calls the model `model`. Raises ApiError 400."""

    @abstractmethod
    def stream(self, ledger: Ledger, request: ParsedRequest, *, keep_timings: bool) -> EventRelay:
        """Takes the events of an answer."""

    @abstractmethod
    def whole(self, ledger: Ledger, request: ParsedRequest, body: bytes, *, keep_timings: bool) -> bytes:
        """The client's bytes of a whole answer; counts and timings go into the ledger.

        Raises msgspec.DecodeError for what is no JSON at all.
        """


class Native(Dialect):
    """The upstream speaks the surface itself: bytes pass through. In this class, OpenAI's chat and its like."""

    def __init__(self, path: str, *, at_root: bool = False) -> None:
        self._path = path
        self.at_root = at_root

    def path(self, request: ParsedRequest) -> str:
        return self._path + request.query

    def body(self, request: ParsedRequest, model: str) -> bytes:
        return request.body_for(model)

    def stream(self, ledger: Ledger, request: ParsedRequest, *, keep_timings: bool) -> EventRelay:
        return StreamRelay(ledger, wants_usage=request.wants_usage, keep_timings=keep_timings)

    def whole(self, ledger: Ledger, request: ParsedRequest, body: bytes, *, keep_timings: bool) -> bytes:
        try:
            found = decode_answer(body)
        except (msgspec.ValidationError, RecursionError):
            return body
        if found.choices and found.choices[0].finish_reason:
            ledger.finish_reason = found.choices[0].finish_reason
        if is_present(found.usage):
            read_usage(ledger, found.usage)
        if is_present(found.timings):
            read_timings(ledger, found.timings, ledger.upstream_end)
            if not keep_timings:
                return without_timings(body)
        return body


class Fallback(msgspec.Struct, frozen=True):
    """How a surface is spoken with an upstream that does not have it."""

    needs: str
    """The surface that the upstream must have instead."""
    dialect: Dialect


class Surface(msgspec.Struct, frozen=True):
    """An API path, its name in metrics and traces, and how it is spoken."""

    name: str
    path: str
    """After the prefix."""
    needs: str
    """What an upstream's `surfaces` must name for the surface to be passed through."""
    native: Dialect
    parse: Callable[[bytes, bytes], ParsedRequest]
    """(body, query string) -> the request. Raises ApiError 400."""
    errors: ErrorShape = OPENAI_ERRORS
    fallback: Fallback | None = None

    def dialect_for(self, upstream: Upstream) -> Dialect | None:
        """How it is spoken with this upstream; None: not at all."""
        if self.needs in upstream.surfaces:
            return self.native
        if self.fallback is not None and self.fallback.needs in upstream.surfaces:
            return self.fallback.dialect
        return None

    def body(self, request: ParsedRequest, target: Target) -> bytes:
        """The request's body for a target that can answer. Raises ApiError 400."""
        return self.dialect(target).body(request, target.model)

    def dialect(self, target: Target) -> Dialect:
        """How it is spoken with a target that can answer (`narrow`)."""
        found = self.dialect_for(target.upstream)
        assert found is not None
        return found

    def narrow(self, route: Route) -> Route:
        """The route with those targets alone that can answer. Raises ApiError 400 where there is none."""
        able = tuple(target for target in route.targets if self.dialect_for(target.upstream) is not None)
        if len(able) == len(route.targets):
            return route
        if not able:
            names = ", ".join(sorted({target.upstream.name for target in route.targets}))
            needed = self.needs if self.fallback is None else f"{self.needs} or {self.fallback.needs}"
            raise ApiError(
                400,
                "unsupported_surface",
                f"The model {route.model!r} can't be asked by {self.path}: its upstream ({names}) does not speak it "
                f"(upstreams.surfaces names no {needed}).",
                param="model",
            )
        return msgspec.structs.replace(route, targets=able)
