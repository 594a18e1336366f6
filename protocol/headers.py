"""Header names that the engine reads and writes, in lower case as ASGI has them."""

REQUEST_ID = "x-request-id"
TOKENLINE_REQUEST_ID = "x-tokenline-request-id"
TRACEPARENT = "traceparent"
