"""The doctor's words in Simplified Chinese: code -> (what was seen, what to do)."""

from __future__ import annotations

STRAYS = {
    "space": "空格",
    "tab": "制表符",
    "line_end": "换行符",
    "invisible": "不可见字符（字节顺序标记 BOM 或零宽空格）",
}
_PROXY_OFF = "NO_PROXY={exempt}（no_proxy 同样设置），或 unset {variable}。"
_UNBUFFER = (
    "请关闭中间代理的缓冲（它自称：{server}）。nginx：proxy_buffering off; gzip off。Apache：flushpackets=on。"
    "其他：不要压缩、不要缓存 text/event-stream。"
)
_CLOCK = "请让两边都与时间服务器同步（timedatectl set-ntp true）：证书、密钥有效期和合并的追踪都依赖时钟。"
_TENANT = "请使用租户端口：`tokenline up` 打印的 base_url，默认端口 8080（由 server.port 决定）。"
_EMPTY_EVENT = "请让客户端跳过没有 choices 的事件，或让服务器不发送这种事件。"
_EMPTY_ANSWER = "后端过滤了内容或静默失败：请绕过网关直接请求它，并查看它的日志。"

TEXTS: dict[str, tuple[str, str]] = {
    # base_url
    "url_well_formed": ("{url}", ""),
    "url_empty": ("base_url 为空。", "请设为 `tokenline up` 打印的地址，例如 http://127.0.0.1:8080/api。"),
    "url_white_space": ("base_url 中有{what}。", "请去掉；以下检查已去掉它。"),
    "url_quoted": ("base_url 两端有引号。", "请写成 {url}：.env 文件和 Docker 会原样保留引号。"),
    "url_unexpanded": ("{url} 中有未展开的变量。", "请设置该变量，或直接写地址；单引号和 .env 文件会使变量不展开。"),
    "url_no_scheme": ("base_url 不是以 http:// 或 https:// 开头。", "请写成 {right}。"),
    "url_bad_scheme": ("{url} 既不是 http:// 也不是 https://。", "这类接口只使用 HTTP；请写 http://。"),
    "url_bad_host": ("{url} 没有主机名，或端口不是 65535 以内的数字。", "请写成 http://主机:端口/api。"),
    "url_has_credentials": ("base_url 中有用户名或密码。", "请去掉：密钥由请求头发送，而 URL 会被写入日志。"),
    "url_has_query": ("base_url 中有 ? 或 #。", "请写成 {url}：客户端会在后面追加路径。"),
    "url_listen_address": ("{host} 是监听地址，不是访问地址。", "请写 {right}，或机器的名称。"),
    "url_trailing_slash": ("路径 {path} 以斜杠结尾。", "请去掉：有的客户端追加 /chat/completions 后会出现两个斜杠。"),
    "url_double_slash": ("base_url 的路径中有连续两个斜杠。", "正确的路径是 {right}。"),
    "url_whole_path": ("base_url 包含了 {ending}，而客户端会自己追加它。", "请在它之前结束：路径为 {right}。"),
    "url_repeated": ("{path} 中有重复的部分。", "正确的路径是 {right}。"),
    "url_v1_for_anthropic": (
        "Anthropic 的客户端会追加 /v1/messages，base_url 自带的 /v1 就重复了。",
        "请去掉：路径为 {right}。",
    ),
    # key
    "key_well_formed": ("来自 {name}，指纹 {fingerprint}", ""),
    "key_not_wanted": ("不发送密钥（--no-key）", ""),
    "key_not_needed": ("没有设置密钥，这里也不需要。", ""),
    "key_none": ("没有设置密钥。", "export {names}=...（`tokenline up` 会打印密钥；`tokenline keys create` 可新建）。"),
    "key_empty": ("变量 {name} 为空或未设置。", "请在启动客户端的终端里 export {name}=...。"),
    "key_white_space": (
        "{name} 中密钥的开头或结尾有{what}。",
        "请重新设置。从文件读取时：{name}=\"$(tr -d '[:space:]' < 文件)\"。以下检查已去掉它。",
    ),
    "key_quoted": ("{name} 中的密钥两端有引号。", "请去掉：.env 文件和 Docker 会原样保留引号。"),
    "key_has_scheme": ("{name} 中的密钥以 Bearer 或请求头名称开头。", "只写密钥本身：其余由客户端添加。"),
    "key_unexpanded": ("{name} 的内容是未展开的 {variable}。", "请把 {name} 设为密钥本身。"),
    "key_placeholder": ("{name} 中是示例文字，不是密钥。", "请填入自己的密钥。"),
    "key_space_inside": ("{name} 的密钥中间有{what}。", "请重新复制，保持完整的一行。"),
    "key_not_ascii": ("{name} 的密钥中有密钥不会有的字符。", "请从最初显示密钥的地方重新复制。"),
    # credentials
    "credentials_agree": ("没有第二个凭据，也没有别的 base_url", ""),
    "two_credentials": (
        "ANTHROPIC_API_KEY（指纹 {key}）和 ANTHROPIC_AUTH_TOKEN（指纹 {token}）同时设置且不同："
        "Claude Code 和 Anthropic SDK 会同时发送，网关拒绝猜测用哪一个。",
        "unset ANTHROPIC_API_KEY，并退出 OAuth 登录（`claude /logout`）。",
    ),
    "other_key": (
        "{name} 中是另一个密钥（指纹 {other}），不是这里检查的（{chosen}）。",
        "SDK 会自动读取 {name}：请设为同一个密钥，或 unset。",
    ),
    "other_base_url": (
        "{name} 指向 {other}；这里检查的是 {chosen}。",
        "读取 {name} 的应用会访问那里：请设为同一个 base_url，或 unset。",
    ),
    # proxy
    "proxy_none": ("没有代理变量起作用", ""),
    "proxy_bypassed": ("设置了 {variable}；NO_PROXY={no_proxy} 使 {host} 不走代理", ""),
    "proxy_used": ("{variable}：经由 {proxy}，代理有应答", ""),
    "proxy_two_values": (
        "{lower} 和 {upper} 同时设置且不同：有的客户端读前者，有的读后者。",
        "请设为相同的值，或 unset 其中一个。",
    ),
    "no_proxy_unread": (
        "{variable} 中的 {entry} 对有的客户端（curl、Go）排除了 {host}，对另一些（Python）不起作用。",
        "请同时写上主机本身：{host}。",
    ),
    "proxy_bad_url": (
        "{variable} 的值 {url} 不是客户端能识别的代理。",
        "请写 http://主机:端口，或 unset {variable}，或设置 NO_PROXY={host}。",
    ),
    "proxy_refused": (
        "{variable} 把发往 {host} 的请求交给 {proxy}，而那里没有应答：代理已退出，变量却留了下来。",
        "unset {variable}，或启动代理。只针对这个地址：export NO_PROXY={exempt}。以下检查不走代理。",
    ),
    "proxy_socks": (
        "{variable} 把发往 {host} 的请求交给 {proxy}。许多客户端使用 SOCKS 需要额外的包"
        "（httpx：Using SOCKS proxy, but the socksio package is not installed）。",
        f"export {_PROXY_OFF}以下检查不走代理。",
    ),
    "proxy_for_local": ("{variable} 把发往 {host}（就在近处）的请求交给 {proxy}。", f"export {_PROXY_OFF}"),
    "proxy_dead_unused": (
        "{variable} 的值是 {proxy}，那里没有应答；NO_PROXY={no_proxy} 使 {host} 不走代理。",
        "unset {variable}：其他请求走它都会失败。",
    ),
    "proxy_spoils": (
        "经过代理得到的应答是：{seen}。不走代理时接口正常。",
        "请用 NO_PROXY 排除该主机，或让代理放行。以下检查不走代理。",
    ),
    "by_proxy": ("由代理负责", ""),
    # the way there
    "dns_not_needed": ("{host} 本身就是地址", ""),
    "dns_resolved": ("{host} 即 {addresses}", ""),
    "dns_failed": (
        "无法解析主机名 {host}：{said}。",
        "请检查拼写。在容器里，其他容器用服务名，宿主机是 host.docker.internal；"
        "/etc/hosts 或 VPN 中的名称只在相应环境里有效。",
    ),
    "dns_slow": ("主机名 {host} 在 {seconds:g} 秒内没有解析出来。", "域名服务器没有应答：请检查 /etc/resolv.conf。"),
    "connected": ("{address} 端口 {port}，{ms} 毫秒", ""),
    "connected_second": ("{address} 端口 {port}，{ms} 毫秒（{first} 没有应答，客户端可能会先尝试它）", ""),
    "connect_refused": (
        "{host} 的端口 {port} 没有程序监听。",
        "网关在运行吗（`tokenline up`）？端口对吗（默认 8080，由 server.port 决定）？在容器里 127.0.0.1 是容器自己；"
        "从另一台机器访问时，server.host 不能是 127.0.0.1。",
    ),
    "connect_timeout": (
        "{host} 的端口 {port} 在 {seconds:g} 秒内没有应答。",
        "防火墙丢弃了数据包，机器没开，或地址属于另一个网络。",
    ),
    "connect_failed": ("无法连接 {host} 的端口 {port}：{said}。", "请检查地址和网络。"),
    "tls_none": ("http，未加密", ""),
    "tls_none_public": (
        "用 http:// 访问公网地址 {host}：沿途的人都能读到密钥。",
        "请使用 https://；可用证书文件（server.tls_cert）或在前面加代理。",
    ),
    "tls_trusted": ("{version}，证书可信", ""),
    "tls_plain_server": (
        "用 https:// 访问 {host} 的端口 {port}，而它只用明文 HTTP。",
        "请写 http://，或给网关配置证书（server.tls_cert、server.tls_key）。",
    ),
    "tls_expected": ("用 http:// 访问了使用 TLS 的服务器。", "请写成 {right}。"),
    "tls_expired": ("{host} 的证书已过期。", "请在服务器上更新证书。"),
    "tls_not_yet_valid": ("{host} 的证书尚未生效。", "请先检查本机的时钟。"),
    "tls_self_signed": (
        "{host} 的证书是自签名的，本机不信任。",
        "请把证书交给客户端：SSL_CERT_FILE=文件（Python），NODE_EXTRA_CA_CERTS=文件（Claude Code、Cline）。",
    ),
    "tls_unknown_issuer": (
        "本机不认识 {host} 证书的签发者（{said}）。",
        "请让服务器发送完整的证书链。公司自己的 CA：SSL_CERT_FILE=文件（Python），"
        "NODE_EXTRA_CA_CERTS=文件（Claude Code、Cline）。",
    ),
    "tls_wrong_host": ("证书不是给 {host} 的（{said}）。", "请写证书上的名称。"),
    "tls_not_trusted": ("{host} 的证书不可信：{said}。", "请修正服务器的证书。"),
    "tls_failed": ("与 {host} 的 TLS 失败：{said}。", "端口对吗？代理或防火墙可能切断了 TLS。"),
    # path and key at the API
    "path_answers": ("{url} 有应答", ""),
    "path_answers_chat": ("那里没有模型列表，但模型有应答", ""),
    "path_tolerated": ("路径可用，但只是网关容忍了它。", "请把 base_url 设为 {right}。"),
    "path_too_short": ("{given} 没有接口：base_url 少了一段路径。", "请设为 {right}。"),
    "path_too_long": ("{given} 没有接口：base_url 多了一段路径。", "请设为 {right}。"),
    "path_redirects": (
        "服务器返回 {status}，跳转到 {target}。跳转时客户端会丢失请求内容。",
        "请把 base_url 设为它指向的地址：{right}。",
    ),
    "path_post_redirects": (
        "提问时返回 {status}，跳转到 {target}。",
        "请把 base_url 设为它指向的地址，去掉客户端追加的路径。",
    ),
    "path_html": (
        "得到的是网页（{status}，标题：{title}），不是接口。",
        "这是别的服务的端口、网络的登录页（请用浏览器打开），或网页界面的路径：请把 base_url 设为接口自己的地址。",
    ),
    "path_no_list": ("没有模型列表（{status}：{said}）", ""),
    "path_unsure": (
        "{url} 之下没有模型列表，其他常见位置也没有。",
        "请对照服务器的文档检查 base_url；也可用 --model M 直接询问一个模型。",
    ),
    "path_unknown": ("{url} 什么都没有：{said}", "请对照服务器的文档检查 base_url 的主机、端口和路径。"),
    "path_ops_port": ("{url} 是 Tokenline 的运维端口（指标、管理接口、控制台），不回答模型请求。", _TENANT),
    "path_otlp_port": ("{url} 是 Tokenline 的 OTLP 端口，只接收引擎的 span。", _TENANT),
    "path_metrics_port": ("{url} 是只有指标的端口。", "请使用服务器的接口端口。"),
    "path_server_error": (
        "还没到接口就返回 {status}：{said}（服务器：{server}）。",
        "前面的代理在应答，它后面的服务没有应答：请看代理和网关的日志。",
    ),
    "path_broken": ("{url}：{said}", "监听在那里的程序不使用 HTTP，或断开了连接：端口对吗？"),
    "auth_accepted": ("已接受", ""),
    "auth_refused": (
        "401（{error}）：{said}",
        "请使用这台服务器的密钥；`tokenline keys list` 列出已有的，`tokenline keys create` 新建。",
    ),
    "auth_forbidden": ("403（{error}）：{said}", "密钥有效但无权这样做：请询问发放密钥的人。"),
    "auth_limited": ("429：{said}（Retry-After：{wait}）", "请稍等，或申请更高的限额（`tokenline plans list`）。"),
    # model
    "model_only_one": ("{model}，列表中唯一的模型", ""),
    "model_listed": ("{model} 在列表中", ""),
    "model_no_list": ("{model}；没有列表可以核对", ""),
    "model_not_named": ("没有模型列表，也没有指定模型：用 --model M 指定。", ""),
    "model_choose": ("列表中有 {count} 个模型；用 --model M 选择一个：{names}", ""),
    "model_none_listed": (
        "模型列表为空。",
        "这个密钥不能使用任何模型（网关的 [[models]]、密钥的 --models），或没有配置模型。",
    ),
    "model_near": ("{model} 不在列表中。", "是不是 {near}？"),
    "model_not_listed": ("{model} 不在列表中。", "列表中有：{names}"),
    "model_unlisted_works": ("{model} 不在列表中，但有应答。", "从列表中选择模型的客户端找不到它；其他都正常。"),
    "model_unknown": ("{model} 返回 404：{said}", "请使用 GET /models 列出的模型名。"),
    "model_forbidden": ("{model} 返回 403：{said}", "请使用密钥允许的模型，或修改密钥的模型范围。"),
    # answer
    "answer_came": ("完整回答用了 {ms} 毫秒", ""),
    "answer_only_reasoning": ("完整回答用了 {ms} 毫秒，全部是推理内容", ""),
    "answer_without_text": ("回答用了 {ms} 毫秒，但没有文字。", "请检查模型的对话模板和停止字符串。"),
    "choices_empty": ("回答的 `{holder}` 为空：客户端读取 {holder}[0] 会出错。", _EMPTY_ANSWER),
    "answer_not_json": ("回答不是 JSON：{said}", "中间有东西改写了回答，或这是别的服务。"),
    "answer_wrong_shape": (
        "回答中没有 `{holder}`（有：{keys}）。",
        "它使用另一种接口：请检查 --surface openai 或 anthropic，以及客户端的提供商设置。",
    ),
    "answer_error_in_200": ("状态码 200，内容却是错误：{said}", "服务器隐藏了失败；详情见它的日志。"),
    "answer_timeout": ("{seconds} 秒内没有回答。", "模型正在加载或负载过高：`tokenline slow`，或 --timeout 5m。"),
    "answer_broken": ("连接中断：{said}", "服务器或中间的代理断开了连接：原因在它们的日志里。"),
    "answer_html": ("得到的是网页（{status}，标题：{title}），不是回答。", "中间的代理自己应答了。"),
    "answer_refused": ("{status}：{said}", "服务器不接受这样的普通提问；原因见它的说明。"),
    "server_failed": (
        "{status}：{said}",
        "后端失败；如果是 Tokenline，用请求 ID 执行 `tokenline why` 可知失败在哪个阶段。",
    ),
    # stream
    "stream_came": ("{events} 个有文字的事件，第一个在 {ttft_ms} 毫秒后", ""),
    "stream_not_sse": ("请求的是流式，得到的是 {kind}。", "服务器不支持流式，或中间的代理把回答收集起来了。"),
    "stream_error": ("流以错误结束：{said}", "后端失败；详情见它的日志。"),
    "stream_broken": ("流在 {events} 个事件后中断：{said}", "中间代理的超时或限制，或服务器结束了：原因在日志里。"),
    "stream_no_events": ("流是空的。", "中间的代理吞掉了它，或服务器静默失败。"),
    "stream_choices_empty": ("{events} 个事件的 `choices` 全部为空。", _EMPTY_ANSWER),
    "stream_first_empty": (
        "第一个事件的 `choices` 为空（Azure 在其中说明过滤结果）：读取 choices[0] 的客户端会出错。",
        _EMPTY_EVENT,
    ),
    "stream_usage_unasked": (
        "最后一个事件的 `choices` 为空，带有没有请求的 token 计数：读取 choices[0] 的客户端会出错。",
        "请让客户端跳过没有 choices 的事件；Tokenline 会为没有请求它的客户端去掉这种事件。",
    ),
    "stream_some_empty": ("{count} 个事件的 `choices` 为空：读取 choices[0] 的客户端会出错。", _EMPTY_EVENT),
    "stream_without_text": ("来了 {events} 个事件，都没有文字。", "请检查模型的对话模板和停止字符串。"),
    "stream_no_end": ("流结束时没有 {end}。", "有的客户端会一直等它，或认为回答被截断：中间的代理或服务器丢掉了它。"),
    "stream_compressed": ("流被压缩了（{encoding}）。", "压缩会扣住事件：请对 text/event-stream 关闭压缩。"),
    # buffering
    "events_apart": ("{events} 个事件陆续到达，历时 {spread_ms} 毫秒", ""),
    "events_at_once": (
        "沉默 {waited_ms} 毫秒后，{events} 个事件在 {spread_ms} 毫秒内一起到达；引擎生成它们用了 {decode_ms} 毫秒。"
        "中间有一层把流收集起来了。",
        _UNBUFFER,
    ),
    "events_held_back": (
        "沉默 {waited_ms} 毫秒后，{events} 个事件在 {spread_ms} 毫秒内一起到达，而较短的回答来得更早："
        "第一个事件在等最后一个。"
        "中间有一层把流收集起来了，或服务器不是流式。",
        _UNBUFFER,
    ),
    "events_in_pieces": (
        "{events} 个事件分 {clumps} 批到达，历时 {spread_ms} 毫秒。中间有一层用缓冲区收集，或引擎每步生成多个 token。",
        _UNBUFFER,
    ),
    "spacing_too_few": ("未知：只有 {events} 个有文字的事件", ""),
    "spacing_too_fast": ("未知：{events} 个事件在 {spread_ms} 毫秒内到达，很快的引擎也会这样", ""),
    "spacing_busy": ("未知：本机太忙，无法测量（停顿了 {lag_ms} 毫秒）", ""),
    # clock
    "clock_agrees": ("与服务器相差不到 5 秒", ""),
    "clock_unknown": ("服务器没有说明时间", ""),
    "clock_ahead": ("服务器的时钟比本机快 {seconds} 秒。", _CLOCK),
    "clock_behind": ("服务器的时钟比本机慢 {seconds} 秒。", _CLOCK),
    # gateway
    "gateway_tokenline": ("Tokenline；`tokenline why {request_id}` 显示最后一个请求的时间线", ""),
    "gateway_tokenline_timed": (
        "Tokenline；最后一个请求到首字节，毫秒：{stages}。`tokenline why {request_id}` 显示它的时间线",
        "",
    ),
    "gateway_other": ("不是 Tokenline 网关（它能说明更多）", ""),
    "after": ("没有检查，因为：{other}", ""),
}
