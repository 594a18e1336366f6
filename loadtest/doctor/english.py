"""The doctor's words in English: code -> (what was seen, what to do)."""

from __future__ import annotations

STRAYS = {
    "space": "a space",
    "tab": "a tab",
    "line_end": "a line end",
    "invisible": "an invisible character (a byte order mark or a zero-width space)",
}
_PROXY_OFF = "NO_PROXY={exempt} (and no_proxy), or unset {variable}."
_UNBUFFER = (
    "Switch buffering off in the proxy between (it calls itself: {server}). nginx: proxy_buffering off; gzip off. "
    "Apache: flushpackets=on. Elsewhere: no compression and no caching of text/event-stream."
)
_CLOCK = (
    "Let both follow a time server (timedatectl set-ntp true): certificates, expiry of keys and joined traces need it."
)
_TENANT = "Use the tenant port: base_url as `tokenline up` prints it, port 8080 unless server.port says otherwise."
_EMPTY_EVENT = "Let the client skip events without choices, or the server leave them out."
_EMPTY_ANSWER = (
    "The server behind filters the content or failed silently: ask it without the gateway, and look at its log."
)

TEXTS: dict[str, tuple[str, str]] = {
    # base_url
    "url_well_formed": ("{url}", ""),
    "url_empty": ("The base_url is empty.", "Set it to what `tokenline up` prints, such as http://127.0.0.1:8080/api."),
    "url_white_space": ("There is {what} in the base_url.", "Take it out; looked at without it here."),
    "url_quoted": ("The base_url has quotes around it.", "Write {url}: .env files and Docker keep quotes as they are."),
    "url_unexpanded": (
        "{url} has a variable that was not expanded.",
        "Set that variable, or write the address itself; single quotes and .env files keep a shell from expanding it.",
    ),
    "url_no_scheme": ("The base_url does not begin with http:// or https://.", "Write {right}."),
    "url_bad_scheme": (
        "{url} is neither http:// nor https://.",
        "Clients of these APIs speak HTTP alone; write http://.",
    ),
    "url_bad_host": ("{url} has no host, or a port that is no number up to 65535.", "Write http://HOST:PORT/api."),
    "url_has_credentials": (
        "The base_url holds a user name or a password.",
        "Take them out: the key is sent as a header, and URLs are logged.",
    ),
    "url_has_query": ("There is a ? or # in the base_url.", "Write {url}: paths are appended to it."),
    "url_listen_address": (
        "{host} is an address to listen on, not one to call.",
        "Write {right}, or the name of the machine.",
    ),
    "url_trailing_slash": (
        "The path {path} ends in a slash.",
        "Take it off: clients that append /chat/completions make two of it.",
    ),
    "url_double_slash": ("There are two slashes in the base_url's path.", "The path is {right}."),
    "url_whole_path": (
        "The base_url holds {ending}, which the client appends itself.",
        "End it before that: the path is {right}.",
    ),
    "url_repeated": ("{path} holds a part twice.", "The path is {right}."),
    "url_v1_for_anthropic": (
        "Anthropic's clients append /v1/messages, so the base_url's own /v1 comes twice.",
        "Leave it out: the path is {right}.",
    ),
    # key
    "key_well_formed": ("from {name}, fingerprint {fingerprint}", ""),
    "key_not_wanted": ("none is sent (--no-key)", ""),
    "key_not_needed": ("No key is set, and none is needed here.", ""),
    "key_none": (
        "No key is set.",
        "export {names}=... (`tokenline up` prints a key; `tokenline keys create` makes one).",
    ),
    "key_empty": (
        "The variable {name} is empty or not set.",
        "export {name}=... in the shell that the client starts in.",
    ),
    "key_white_space": (
        "The key in {name} begins or ends with {what}.",
        "Set it again without. Read from a file: {name}=\"$(tr -d '[:space:]' < FILE)\". Looked at without it here.",
    ),
    "key_quoted": (
        "The key in {name} has quotes around it.",
        "Take them off: .env files and Docker keep them as they are.",
    ),
    "key_has_scheme": (
        "The key in {name} begins with 'Bearer' or a header's name.",
        "Set the key alone: the client adds the rest.",
    ),
    "key_unexpanded": ("{name} holds {variable}, which was not expanded.", "Set {name} to the key itself."),
    "key_placeholder": ("{name} holds an example in place of a key.", "Put your own key there."),
    "key_space_inside": ("There is {what} inside the key in {name}.", "Copy it again, in one piece and on one line."),
    "key_not_ascii": (
        "The key in {name} has characters that no key has.",
        "Copy it again, from where it was shown first.",
    ),
    # credentials
    "credentials_agree": ("no second credential, no other base_url", ""),
    "two_credentials": (
        "ANTHROPIC_API_KEY (fingerprint {key}) and ANTHROPIC_AUTH_TOKEN ({token}) are both set and differ: "
        "Claude Code and Anthropic's SDK send both, and the gateway refuses to choose.",
        "unset ANTHROPIC_API_KEY, and log out of an OAuth login (`claude /logout`).",
    ),
    "other_key": (
        "{name} holds another key (fingerprint {other}) than the one looked at ({chosen}).",
        "SDKs read {name} by themselves: set it to the same key, or unset it.",
    ),
    "other_base_url": (
        "{name} leads to {other}; looked at here is {chosen}.",
        "Apps that read {name} go there: set it to the same base_url, or unset it.",
    ),
    # proxy
    "proxy_none": ("no proxy variable applies", ""),
    "proxy_bypassed": ("{variable} is set; NO_PROXY={no_proxy} takes {host} out of it", ""),
    "proxy_used": ("{variable}: by {proxy}, which answers", ""),
    "proxy_two_values": (
        "{lower} and {upper} are both set and differ: some clients read the one, some the other.",
        "Set both to the same, or unset one.",
    ),
    "no_proxy_unread": (
        "{variable} has {entry}, which takes {host} out for some clients (curl, Go) and means nothing to "
        "others (Python's).",
        "Name the host itself too: {host}.",
    ),
    "proxy_bad_url": (
        "{variable} is {url}, which is no proxy that clients understand.",
        "Write http://HOST:PORT, unset {variable}, or set NO_PROXY={host}.",
    ),
    "proxy_refused": (
        "{variable} sends requests for {host} to {proxy}, where nothing answers: a proxy that was ended and left its "
        "variable behind.",
        "unset {variable}, or start the proxy. For this address alone: export NO_PROXY={exempt}. "
        "Looked at without the proxy here.",
    ),
    "proxy_socks": (
        "{variable} sends requests for {host} to {proxy}. Many clients need another package for SOCKS "
        "(httpx: 'Using SOCKS proxy, but the socksio package is not installed').",
        f"export {_PROXY_OFF} Looked at without the proxy here.",
    ),
    "proxy_for_local": (
        "{variable} sends requests for {host}, which is near, through {proxy}.",
        f"export {_PROXY_OFF}",
    ),
    "proxy_dead_unused": (
        "{variable} is {proxy}, where nothing answers; NO_PROXY={no_proxy} keeps {host} out of it.",
        "unset {variable}: whatever else asks there fails.",
    ),
    "proxy_spoils": (
        "Through the proxy the answer is: {seen}. Straight on, the API answers.",
        "Take the host out of the proxy with NO_PROXY, or let the proxy pass it. Looked at without the proxy here.",
    ),
    "by_proxy": ("the proxy's business", ""),
    # the way there
    "dns_not_needed": ("{host} is an address", ""),
    "dns_resolved": ("{host} is {addresses}", ""),
    "dns_failed": (
        "The name {host} can't be resolved: {said}.",
        "Look for a slip in it. In a container, other containers have their service names, and the host is "
        "host.docker.internal; a name from /etc/hosts or a VPN is known only where that is.",
    ),
    "dns_slow": (
        "The name {host} is not resolved within {seconds:g} s.",
        "The name server does not answer: /etc/resolv.conf.",
    ),
    "connected": ("{address}, port {port}, in {ms} ms", ""),
    "connected_second": ("{address}, port {port}, in {ms} ms ({first} does not answer, clients may try it first)", ""),
    "connect_refused": (
        "Nothing listens at {host}, port {port}.",
        "Is the gateway running (`tokenline up`), and is this its port (8080 unless server.port says "
        "otherwise)? From a "
        "container, 127.0.0.1 is the container itself; from another machine, server.host must not be 127.0.0.1.",
    ),
    "connect_timeout": (
        "{host}, port {port} does not answer within {seconds:g} s.",
        "A firewall drops the packets, the machine is off, or the address is another network's.",
    ),
    "connect_failed": ("No connection to {host}, port {port}: {said}.", "Look at the address and the network."),
    "tls_none": ("http, unencrypted", ""),
    "tls_none_public": (
        "http:// to {host}, a public address: everybody on the way can read the key.",
        "Use https://; TLS by certificate files (server.tls_cert) or a proxy in front.",
    ),
    "tls_trusted": ("{version}, certificate trusted", ""),
    "tls_plain_server": (
        "https:// to {host}, port {port}, which speaks plain HTTP.",
        "Write http://, or give the gateway a certificate (server.tls_cert, server.tls_key).",
    ),
    "tls_expected": ("http:// to a server that speaks TLS.", "Write {right}."),
    "tls_expired": ("The certificate of {host} has expired.", "Renew it on the server."),
    "tls_not_yet_valid": ("The certificate of {host} is not valid yet.", "Look at this machine's clock first."),
    "tls_self_signed": (
        "The certificate of {host} is signed by nobody that this machine trusts (self-signed).",
        "Give clients the certificate: SSL_CERT_FILE=FILE (Python), NODE_EXTRA_CA_CERTS=FILE (Claude Code, Cline).",
    ),
    "tls_unknown_issuer": (
        "The issuer of the certificate of {host} is not known to this machine ({said}).",
        "Let the server send the whole chain. A company's own authority: SSL_CERT_FILE=FILE (Python), "
        "NODE_EXTRA_CA_CERTS=FILE (Claude Code, Cline).",
    ),
    "tls_wrong_host": ("The certificate is for another name than {host} ({said}).", "Write the name that it is for."),
    "tls_not_trusted": ("The certificate of {host} is not trusted: {said}.", "Put the server's certificate in order."),
    "tls_failed": ("No TLS with {host}: {said}.", "Is it the right port? A proxy or firewall may cut TLS off."),
    # path and key at the API
    "path_answers": ("{url} answers", ""),
    "path_answers_chat": ("no list of models there, but models answer", ""),
    "path_tolerated": ("The path works, but only because the gateway makes allowance.", "Set base_url to {right}."),
    "path_too_short": ("There is no API at {given}: the base_url is cut short.", "Set it to {right}."),
    "path_too_long": ("There is no API at {given}: the base_url has a part too many.", "Set it to {right}."),
    "path_redirects": (
        "The server answers {status} and sends elsewhere: {target}. Clients lose the request's body on the way.",
        "Set base_url to where it leads: {right}.",
    ),
    "path_post_redirects": (
        "A question is answered with {status} and sent elsewhere: {target}.",
        "Set base_url to where it leads, without the path that clients append.",
    ),
    "path_html": (
        "A web page answers ({status}, title: {title}), no API.",
        "It is another server's port, a login page of the network (open it in a browser), or a path of a web "
        "interface: "
        "set base_url to the API's own address.",
    ),
    "path_no_list": ("no list of models ({status}: {said})", ""),
    "path_unsure": (
        "There is no list of models below {url}, nor in any other usual place.",
        "Compare base_url with the server's own documentation; --model M asks a model all the same.",
    ),
    "path_unknown": (
        "There is nothing at {url}: {said}",
        "Compare host, port and path of base_url with the server's own documentation.",
    ),
    "path_ops_port": (
        "{url} is Tokenline's ops port (metrics, admin API, console), which answers no model requests.",
        _TENANT,
    ),
    "path_otlp_port": (
        "{url} is Tokenline's OTLP port, which takes engines' spans.",
        _TENANT,
    ),
    "path_metrics_port": ("{url} is a port with metrics alone.", "Use the server's API port."),
    "path_server_error": (
        "{status} before any API was reached: {said} (server: {server}).",
        "A proxy in front answers, and what is behind it does not: look at its log and at the gateway's.",
    ),
    "path_broken": ("{url}: {said}", "What listens there does not speak HTTP, or hung up: is it the right port?"),
    "auth_accepted": ("accepted", ""),
    "auth_refused": (
        "401 ({error}): {said}",
        "Use a key of this server; `tokenline keys list` shows which there are, `tokenline keys create` makes one.",
    ),
    "auth_forbidden": ("403 ({error}): {said}", "The key is known but may not do this: ask whoever made it."),
    "auth_limited": ("429: {said} (Retry-After: {wait})", "Wait, or ask for a higher limit (`tokenline plans list`)."),
    # model
    "model_only_one": ("{model}, the only one listed", ""),
    "model_listed": ("{model} is listed", ""),
    "model_no_list": ("{model}; there is no list to look it up in", ""),
    "model_not_named": ("Nothing lists models, and none was named: --model M asks one.", ""),
    "model_choose": ("{count} models are listed; --model M asks one: {names}", ""),
    "model_none_listed": (
        "The list of models is empty.",
        "The key may use none ([[models]] of the gateway, --models of the key), or none is set up.",
    ),
    "model_near": ("{model} is not listed.", "Did you mean {near}?"),
    "model_not_listed": ("{model} is not listed.", "Listed are: {names}"),
    "model_unlisted_works": (
        "{model} is not listed, but answers.",
        "Clients that choose from the list don't find it; else all is well.",
    ),
    "model_unknown": ("404 for {model}: {said}", "Name a model as GET /models lists it."),
    "model_forbidden": ("403 for {model}: {said}", "Use a model that the key may use, or change the key's models."),
    # answer
    "answer_came": ("whole answer in {ms} ms", ""),
    "answer_only_reasoning": ("whole answer in {ms} ms, all of it reasoning", ""),
    "answer_without_text": (
        "The answer came in {ms} ms and has no text.",
        "Look at the model's chat template and stop strings.",
    ),
    "choices_empty": (
        "The answer's `{holder}` is empty: clients fail at {holder}[0].",
        _EMPTY_ANSWER,
    ),
    "answer_not_json": (
        "The answer is no JSON: {said}",
        "Something between rewrites answers, or it is another service.",
    ),
    "answer_wrong_shape": (
        "The answer has no `{holder}` (it has: {keys}).",
        "It speaks another API: --surface openai or anthropic, and the client's provider setting.",
    ),
    "answer_error_in_200": (
        "Status 200, and in it an error: {said}",
        "The server hides its failure; its log says more.",
    ),
    "answer_timeout": (
        "No answer within {seconds} s.",
        "The model is loading or overloaded: `tokenline slow`, or --timeout 5m.",
    ),
    "answer_broken": ("The connection broke: {said}", "The server or a proxy between hung up: their logs say why."),
    "answer_html": (
        "A web page came in place of an answer ({status}, title: {title}).",
        "A proxy between answers by itself.",
    ),
    "answer_refused": ("{status}: {said}", "The server takes no plain question of this kind; it says why."),
    "server_failed": (
        "{status}: {said}",
        "The server behind failed; with Tokenline, `tokenline why` with the request's id says in which stage.",
    ),
    # stream
    "stream_came": ("{events} events with text, the first after {ttft_ms} ms", ""),
    "stream_not_sse": (
        "A stream was asked for and {kind} came.",
        "The server does not stream, or a proxy between collects the answer.",
    ),
    "stream_error": ("The stream ends in an error: {said}", "The server behind failed; its log says more."),
    "stream_broken": (
        "The stream broke after {events} events: {said}",
        "A timeout or a limit of a proxy between, or the server ended: their logs say which.",
    ),
    "stream_no_events": ("The stream is empty.", "A proxy between swallows it, or the server failed silently."),
    "stream_choices_empty": (
        "None of the {events} events has anything in `choices`.",
        _EMPTY_ANSWER,
    ),
    "stream_first_empty": (
        "The first event has empty `choices` (Azure tells its filters there): clients that read choices[0] fail.",
        _EMPTY_EVENT,
    ),
    "stream_usage_unasked": (
        "The last event has empty `choices` and token counts that were not asked for: clients that read "
        "choices[0] fail.",
        "Let the client skip events without choices; Tokenline takes such an event out for those who did not ask.",
    ),
    "stream_some_empty": (
        "{count} events have empty `choices`: clients that read choices[0] fail.",
        _EMPTY_EVENT,
    ),
    "stream_without_text": (
        "{events} events came, and none with text.",
        "Look at the model's chat template and stop strings.",
    ),
    "stream_no_end": (
        "The stream ended without {end}.",
        "Some clients wait for it, or take the answer as cut short: something between drops it, or the server does.",
    ),
    "stream_compressed": (
        "The stream is compressed ({encoding}).",
        "Compression keeps events back: switch it off for text/event-stream.",
    ),
    # buffering
    "events_apart": ("{events} events came apart, over {spread_ms} ms", ""),
    "events_at_once": (
        "{events} events came within {spread_ms} ms, after {waited_ms} ms of silence; the engine took "
        "{decode_ms} ms to make "
        "them. A layer between collects the stream.",
        _UNBUFFER,
    ),
    "events_held_back": (
        "{events} events came within {spread_ms} ms, after {waited_ms} ms of silence, and a shorter answer "
        "came sooner: the "
        "first event waits for the last. A layer between collects the stream, or the server does not stream.",
        _UNBUFFER,
    ),
    "events_in_pieces": (
        "{events} events came in {clumps} clumps, over {spread_ms} ms. A layer between collects them in a "
        "buffer, or the "
        "engine makes several tokens in a step.",
        _UNBUFFER,
    ),
    "spacing_too_few": ("unknown: only {events} events with text", ""),
    "spacing_too_fast": ("unknown: {events} events came within {spread_ms} ms, which a fast engine does too", ""),
    "spacing_busy": ("unknown: this machine was too busy to measure (held up for {lag_ms} ms)", ""),
    # clock
    "clock_agrees": ("within 5 s of the server's", ""),
    "clock_unknown": ("the server does not tell the time", ""),
    "clock_ahead": (
        "The server's clock is {seconds} s ahead of this machine's.",
        _CLOCK,
    ),
    "clock_behind": (
        "The server's clock is {seconds} s behind this machine's.",
        _CLOCK,
    ),
    # gateway
    "gateway_tokenline": ("Tokenline; `tokenline why {request_id}` shows the last request's timeline", ""),
    "gateway_tokenline_timed": (
        "Tokenline; the last request until its first byte, ms: {stages}. `tokenline why {request_id}` shows "
        "its timeline",
        "",
    ),
    "gateway_other": ("not a Tokenline gateway, which would tell more", ""),
    "after": ("not looked at, because of: {other}", ""),
}
